"""Other engines, and ours, behind one small interface for benchmarks/peers.py. One file per engine."""
