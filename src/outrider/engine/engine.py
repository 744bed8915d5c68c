"""The engine: prompts in, the target's own text out, several tokens per forward.

One step, whatever the drafter, the batch and the temperature:

    turns   = scheduler.pick()             who runs, with how many rows
    trees   = drafter.propose(requests)    guesses; the root alone is plain decoding
    scores  = runner.forward(feeds)        logits at every node, one pass
    verdict = verify(tree, draws)          the accepted path and the closing token
    rows.commit(pending, path)             the only place where a cache grows
    sequence.extend(draws)                 the only place where a text is cut
    drafter.observe(observations)
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from outrider.core import verify
from outrider.core.cache import CacheFullError, Pages, Rows
from outrider.core.params import ParameterError, SamplingParams
from outrider.core.sampling import DrawError
from outrider.core.sequence import Sequence
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Tree
from outrider.core.verify import LawError, Verdict
from outrider.drafters import registry
from outrider.drafters.base import Context, Drafter, DrafterError, Follower, Observation, Options, Request
from outrider.drafters.costs import Costs
from outrider.engine.controller import Controller, Drafted
from outrider.engine.detokenizer import Detokenizer
from outrider.engine.grammar import FORCED, Grammar, Grammars
from outrider.engine.profile import starting_costs
from outrider.engine.results import Delta, FinishReason, Origin, Result, Step, TokenLogprobs, Usage
from outrider.engine.scheduler import Scheduler, Turn
from outrider.engine.speculation import Speculation, Verify
from outrider.engine.speed import Speed, Speedometer
from outrider.engine.transitions import Listener, Mode, Reason, Transition, Transitions
from outrider.runtime.runner import Feed, Runner, Scores

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles
    from outrider.models.tokenizer import Tokenizer

__all__ = ["Engine", "Stream"]

_JUDGED = 64  # rows of a step whose logits are kept for the prompt's log-probabilities: 12 MB at 49,152 tokens

T = TypeVar("T")
Message = Mapping[str, Any]
Prompt = str | Seq[int] | Seq[Message]


class Loaded(Protocol):
    """A model ready to run: what `outrider.runtime.load.load` returns."""

    @property
    def runner(self) -> Runner: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def files(self) -> ModelFiles: ...


@dataclass(slots=True)
class _Active:
    """What the engine knows of a request beyond its sequence."""

    sequence: Sequence
    text: Detokenizer
    request: Request
    drafter: Drafter
    max_guesses: int
    admitted: float
    origins: list[Origin] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    accepted: int = 0  # drafted tokens kept in the text
    cached: int | None = None  # tokens of the prompt that came from the prefix cache, once that was looked into
    preempted: bool = False
    asked: bool = False  # whether its drafter was asked in the last step
    drafter_error: str | None = None  # why it goes on without its drafter
    judged: list[TokenLogprobs | None] | None = None  # of the prompt's tokens so far, if they are asked for
    first: float | None = None  # when the first token came
    last: float = 0.0
    timings: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "forward": 0.0, "verify": 0.0})

    @property
    def judges(self) -> bool:
        """Whether tokens of the prompt still want their log-probabilities."""
        return self.judged is not None and len(self.judged) < self.sequence.shaping.prompt_length


@dataclass(slots=True)
class _Group:
    """The requests of a step that one drafter drafts for."""

    drafter: Drafter
    members: list[int] = field(default_factory=list)  # the turns of those that it was asked for
    paced: list[int] = field(default_factory=list)  # sequences for which the controller says whether it is asked
    proposed: list[Tree] = field(default_factory=list)  # for each of the members
    seconds: float = 0.0  # of `propose`


class Engine:
    """One target model, any drafters, many sequences.

    `model` and `draft_model` are names or paths. `drafter` is the method that requests get unless they name another;
    `drafter_options` are its options. With `adapt`, drafts are cut to what pays by measured costs, and a text whose
    drafts cost more than they bring goes on plainly; without, only the drafter's own estimates and the usual costs
    count, so that the steps are the same in every run. `min_acceptance` is a floor on the rate of accepted guesses: a
    drafter that stays under it goes on plainly, and is tried again. With `enable_prefix_caching`, texts that begin
    alike share cache rows, with those that have ended too: what was fed once is not fed again.

    Raises ValueError subclasses (ModelError, DrafterError, ParameterError) that name the culprit before anything runs.
    Not thread-safe: one thread steps it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        drafter: str = "none",
        draft_model: str | Path | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        verify: Verify = "match",
        max_draft_tokens: int | None = None,
        batch_size: int = 8,
        prefill_chunk: int = 512,
        adapt: bool = True,
        min_acceptance: float | None = None,
        enable_prefix_caching: bool = True,
        announce: Callable[[str, Mapping[str, int]], None] | None = None,
        **loading: Any,
    ) -> None:
        """`announce` is told each drafter's bytes, by purpose, before it is loaded."""
        from outrider.runtime.load import load

        registry.options(drafter, drafter_options or {})  # refuse before anything is loaded
        _check_floor(min_acceptance, verify)
        self._announce = announce
        self._loading = loading
        self._setup(
            load(model, **loading),
            drafter=drafter,
            draft_model=None if draft_model is None else str(draft_model),
            drafter_options=drafter_options or {},
            speculation=Speculation(verify=verify, max_draft_tokens=max_draft_tokens),
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            adapt=adapt,
            min_acceptance=min_acceptance,
            enable_prefix_caching=enable_prefix_caching,
        )

    @classmethod
    def from_loaded(
        cls,
        loaded: Loaded,
        *,
        drafter: str = "none",
        draft: Loaded | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        verify: Verify = "match",
        max_draft_tokens: int | None = None,
        batch_size: int = 8,
        prefill_chunk: int = 512,
        adapt: bool = False,
        min_acceptance: float | None = None,
        enable_prefix_caching: bool = True,
    ) -> Engine:
        """An engine over models that are in memory already; `draft` serves as the draft model."""
        _check_floor(min_acceptance, verify)
        engine = cls.__new__(cls)
        engine._loading = {}
        engine._draft = draft
        engine._setup(
            loaded,
            drafter=drafter,
            draft_model=None if draft is None else "given",
            drafter_options=drafter_options or {},
            speculation=Speculation(verify=verify, max_draft_tokens=max_draft_tokens),
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            adapt=adapt,
            min_acceptance=min_acceptance,
            enable_prefix_caching=enable_prefix_caching,
        )
        return engine

    _draft: Loaded | None = None
    _announce: Callable[[str, Mapping[str, int]], None] | None = None

    def _setup(
        self,
        loaded: Loaded,
        *,
        drafter: str,
        draft_model: str | None,
        drafter_options: Mapping[str, Any],
        speculation: Speculation,
        batch_size: int,
        prefill_chunk: int,
        adapt: bool,
        min_acceptance: float | None,
        enable_prefix_caching: bool,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("prefill_chunk", prefill_chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(name, f"{value!r} is not a whole number of at least 1")
        self._loaded = loaded
        self.runner, self.tokenizer, self.files = loaded.runner, loaded.tokenizer, loaded.files
        self.config = loaded.runner.config
        self._default_drafter, self._default = drafter, speculation
        self._draft_model = draft_model
        self._options = {drafter: dict(drafter_options)}
        self._drafters: dict[str, Drafter] = {}
        self.grammars = Grammars(self.tokenizer, self.config.vocabulary)
        self._guesses: dict[str, int] = {}  # by drafter: its own max_draft_tokens
        self._origins: dict[str, tuple[Options, Mapping[str, Callable[[], str]]]] = {}  # by drafter
        self._scheduler = Scheduler(batch_size, prefill_chunk, self._known, self._reuse)
        self._prefix_caching = enable_prefix_caching
        self._costs = Costs(live=adapt)
        self._transitions = Transitions()
        self._speedometer = Speedometer(self._costs)
        self._controller = Controller(self._costs, self._transitions, live=adapt, least=min_acceptance or 0.0)
        self._observing: dict[str, float] = {}  # by drafter, seconds of its last `observe` per text
        self._active: dict[int, _Active] = {}
        self._results: dict[int, Result] = {}
        self._failures: dict[int, ValueError] = {}
        self._boxes: dict[int, list[Delta]] = {}  # of open streams: deltas that nobody has read yet
        self._next = 0
        self._blamed: set[str] = set()  # drafters whose failure has been told
        self.steps = 0  # forwards since the start
        self.seconds = {"draft": 0.0, "forward": 0.0, "verify": 0.0}  # spent in them, by phase
        self.prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.prefix_hits = 0  # and those whose rows were there
        self._drafter("none")
        self._drafter(drafter)

    # -- the door ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: Speculation | Seq[Speculation] | None = None,
    ) -> list[Result]:
        """Write a text for each prompt and return the results in their order.

        A prompt is a text, a list of token ids, or a list of chat messages (`{"role", "content"}`).
        """
        many = _as_list(prompts)
        each_params = _per_prompt("params", params, SamplingParams(), len(many))
        each_speculation = _per_prompt("speculation", speculation, Speculation(), len(many))
        ids: list[int] = []
        try:
            for prompt, p, s in zip(many, each_params, each_speculation, strict=True):
                ids.append(self.add(prompt, p, s))
            while any(i in self._active for i in ids):
                self.step()
            return [self.result(i) for i in ids]
        except BaseException:
            for i in ids:
                self.cancel(i)
                self._results.pop(i, None)
                self._failures.pop(i, None)
            raise

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Speculation | None = None
    ) -> Stream:
        """Iterate over what each step adds to one text. Closing the iterator cancels; `.result` after its end."""
        return Stream(self, self.add(prompt, params, speculation))

    def add(self, prompt: Prompt, params: SamplingParams | None = None, speculation: Speculation | None = None) -> int:
        """Admit a request and return its id. Raises ParameterError or DrafterError and admits nothing."""
        params = params or SamplingParams()
        speculation = speculation or Speculation()
        params.check_vocabulary(self.config.vocabulary)
        tokens = self.encode(prompt)
        limit = min(self.config.context, self.runner.pages.count * self.runner.pages.page_size)
        if len(tokens) >= limit:
            what = "context" if limit == self.config.context else "cache"
            raise ParameterError("prompt", f"{len(tokens):,} tokens leave no room in the {what} of {limit:,}")
        name = speculation.drafter
        if name is None:
            name = "prediction" if speculation.prediction is not None else self._default_drafter
        if not speculation.enabled:
            name = "none"
        drafter = self._drafter(name)
        prediction = self._prediction(speculation)
        rule = speculation.verify or self._default.verify or "match"
        guesses = speculation.max_draft_tokens
        if guesses is None:
            guesses = self._default.max_draft_tokens
        if guesses is None:
            guesses = self._guesses[name]
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed % 2**64
        ends = (*(() if params.ignore_eos else self.tokenizer.eos), *params.stop_token_ids)
        shaping = Shaping(params, seed, tokens, len(tokens), ends)
        if params.grammar is not None:
            shaping.grammar = self.grammars.start(params.grammar, tokens, len(tokens))
        skip = self.tokenizer.is_special if params.skip_special_tokens else _never
        text = Detokenizer(self.tokenizer.token_bytes, skip, params.stop, params.include_stop_str_in_output)
        rows = Rows(self.runner.pages, shared=self._prefix_caching)
        sequence = Sequence(self._next, shaping, rows, text, limit)
        self._next += 1
        self._active[sequence.id] = _Active(
            sequence=sequence,
            text=text,
            request=Request(sequence.id, shaping, 0, rule == "rejection", prediction, rows),
            drafter=drafter,
            max_guesses=guesses,
            judged=None if params.prompt_logprobs is None else [None],
            admitted=time.perf_counter(),
        )
        self._scheduler.add(sequence)
        return sequence.id

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids; ParameterError where it has none or names a token outside the vocabulary."""
        if not _is_sequence(prompt):
            raise ParameterError("prompt", f"{prompt!r} is neither a text nor a list of token ids or messages")
        if isinstance(prompt, str):
            tokens = self.tokenizer.prompt(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):
            for index, message in enumerate(prompt):
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    raise ParameterError("prompt", f"message {index} has no role: {message!r}")
            tokens = self.tokenizer.chat(cast("Seq[Message]", prompt))
        else:
            tokens = []
            for token in cast("Seq[int]", prompt):
                if isinstance(token, bool) or not isinstance(token, Integral):
                    raise ParameterError("prompt", f"{token!r} is not a token id")
                tokens.append(int(token))
                if not 0 <= token < self.config.vocabulary:
                    raise ParameterError(
                        "prompt", f"token {token} is outside the vocabulary of {self.config.vocabulary:,}"
                    )
        if not tokens:
            raise ParameterError("prompt", "it is empty")
        return tokens

    def _prediction(self, speculation: Speculation) -> Seq[int]:
        expected = speculation.prediction
        if expected is None:
            return ()
        tokens = self.tokenizer.encode(expected) if isinstance(expected, str) else expected
        for token in tokens:
            if not 0 <= token < self.config.vocabulary:
                raise ParameterError(
                    "prediction", f"token {token} is outside the vocabulary of {self.config.vocabulary:,}"
                )
        return tokens

    def cancel(self, id: int) -> None:
        """Stop a request now; its pages are free at once. Nothing happens if it is not running."""
        active = self._active.get(id)
        if active is not None:
            active.text.end(None)
            active.sequence.finish_reason = "cancelled"
            self._finish(active)

    def result(self, id: int) -> Result:
        """The result of a finished request, handed out once; raises the error of one that ended with an error."""
        if id in self._failures:
            raise self._failures.pop(id)
        if id not in self._results:
            raise KeyError(f"request {id} has no result: it is still running, unknown or was handed out")
        return self._results.pop(id)

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the requests that have a place in the batch."""
        return tuple(sequence.id for sequence in self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place: admitted and not begun, or preempted."""
        return len(self._scheduler.waiting)

    @property
    def loaded(self) -> Loaded:
        """The target as it lies in memory: for another engine over it (`from_loaded`)."""
        return self._loaded

    @property
    def pages(self) -> Pages:
        """Of the target's cache."""
        return self.runner.pages

    @property
    def batch_size(self) -> int:
        return self._scheduler.batch_size

    @property
    def default_drafter(self) -> str:
        return self._default_drafter

    @property
    def drafters(self) -> list[str]:
        """Methods that are loaded."""
        return list(self._drafters)

    def prepare(self, drafter: str) -> None:
        """Load a method before the first request asks for it. Raises DrafterError."""
        self._drafter(drafter)

    def use_profile(self) -> bool:
        """Begin with the costs that `outrider profile` measured of this model here. Returns whether there are any.

        Reads the model's file for its hash.
        """
        known = starting_costs(self._loaded)
        if known is not None:
            self._costs.begin(known)
        return known is not None

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of each change of mode, on the thread that steps; call what is returned to end it.

        A listener that fails is logged and told of the next change all the same.
        """
        return self._transitions.watch(listener)

    @property
    def speed(self) -> Speed:
        """What decoding took since the start, and what it would have taken without guesses. Read from any thread."""
        return self._speedometer.speed

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The latest changes of mode, oldest first. Safe to read from any thread, as the two below."""
        return self._transitions.recent

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Whether each drafter that was asked drafts at present."""
        return self._transitions.modes

    @property
    def transition_counts(self) -> Mapping[tuple[str, Mode, Reason], int]:
        """Changes since the start, by drafter, new mode and reason."""
        return self._transitions.counts

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose, those of the drafters included."""
        out = {f"target {purpose}": size for purpose, size in self.runner.memory().items()}
        for name, drafter in self._drafters.items():
            for purpose, size in drafter.memory().items():
                out[f"{name}: {purpose}"] = size
        return out

    def _drafter(self, name: str) -> Drafter:
        drafter = self._drafters.get(name)
        if drafter is None:
            cls = registry.find(name)
            given, most = self._options.get(name, {}), self._default.max_draft_tokens
            # the engine's limit replaces the method's default, which a longer draft would not get past
            options = registry.options(name, given if most is None else {"max_draft_tokens": most, **given})
            context = self._context()
            if self._announce is not None:
                self._announce(name, cls.forecast(options, context))
            self._origins[name] = options, context.opened
            drafter = self._drafters[name] = cls(options, context)
            self._guesses[name] = options.max_draft_tokens
        return drafter

    def provenance(self, drafter: str) -> dict[str, Any]:
        """What a loaded method runs with: its options, and by name the SHA-256 of all that it was loaded from.

        Ready for JSON. Reads files that were not hashed before. Safe to call from any thread.
        """
        options, opened = self._origins[drafter]
        return {
            "drafter": drafter,
            "options": asdict(options),
            "weights": {name: digest() for name, digest in opened.items()},
        }

    def configure(self, name: str, options: Mapping[str, Any]) -> None:
        """The options of a drafter besides the engine's own, before a request first names it. Raises DrafterError."""
        registry.options(name, options)
        if name in self._drafters:
            raise DrafterError(f"{name}: it is loaded already, its options cannot change")
        self._options[name] = dict(options)

    def forecast(self, name: str) -> dict[str, int]:
        """Bytes that a drafter will hold, by purpose, told before anything of it is loaded."""
        return registry.find(name).forecast(registry.options(name, self._options.get(name, {})), self._context())

    def _context(self) -> Context:
        return Context(
            config=self.config,
            tokenizer=self.tokenizer,
            target=self.runner,
            files=self.files,
            load=self._load_draft,
            forecast=self._forecast_draft,
            draft_model=self._draft_model,
            batch_size=self._scheduler.batch_size,
            costs=self._costs,
            prefix_caching=self._prefix_caching,
            prefill_chunk=self._scheduler.prefill_chunk,
        )

    def _forecast_draft(self, name: str) -> dict[str, int]:
        if self._draft is not None:
            return self._draft.runner.memory()
        from outrider.runtime.load import forecast

        return forecast(self._draft_files(name), **self._loading)

    def _load_draft(self, name: str) -> Loaded:
        if self._draft is not None:
            return self._draft
        from outrider.runtime.load import load

        return load(self._draft_files(name), **self._loading)

    def _draft_files(self, name: str) -> str | ModelFiles:
        """A draft that was trained for this target takes its embedding and tokenizer from it."""
        from outrider.models.heads import is_draft, read_draft

        return read_draft(name, self.files) if is_draft(Path(name)) else name

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Run one forward over all sequences that can run, and return what it added to each.

        A request for which nothing can be drawn (broken logits, everything kept out) ends alone, with the reason
        `error`. A drafter that fails is given up for the requests of this step: they go on plainly, and say so in their
        result. Any other exception passes through, and no text or cache has changed: the step can be run again.
        """
        turns, preempted = self._scheduler.pick()
        for sequence in preempted:
            active = self._active[sequence.id]
            active.preempted = True
            self._forget(active)
        if not turns:
            return []
        actives = [self._active[turn.sequence.id] for turn in turns]
        for turn, active in zip(turns, actives, strict=True):
            if active.judges and turn.rows > _JUDGED:
                turn.rows, turn.scored = _JUDGED, False
        started = time.perf_counter()
        trees, groups = self._propose(turns, actives)
        drafted = time.perf_counter()
        feeds = [_feed(turn, active, tree) for turn, active, tree in zip(turns, actives, trees, strict=True)]
        starts = [feed.rows.length for feed in feeds]
        wants = self._wants(actives, feeds)
        scores = self.runner.forward(feeds, wants)
        forwarded = time.perf_counter()
        # every verdict comes before any commit: an exception up to here leaves all sequences as they were
        verdicts = [self._verdict(a, feeds[i], trees[i], scores, i) for i, a in enumerate(actives)]
        ended = time.perf_counter()
        phases = {"draft": drafted - started, "forward": forwarded - drafted, "verify": ended - forwarded}
        self.steps += 1
        for phase, seconds in phases.items():
            self.seconds[phase] += seconds
        deltas: list[Delta] = []
        for active, feed, tree, verdict in zip(actives, feeds, trees, verdicts, strict=True):
            for phase, seconds in phases.items():
                active.timings[phase] += seconds / len(actives)
            if isinstance(verdict, ValueError):
                deltas.append(self._fail(active, verdict))
                continue
            feed.rows.commit(len(feed.pending), verdict.path if verdict else ())
            if verdict is not None and tree is not None:
                deltas.append(self._extend(active, tree, verdict, ended))
            feed.rows.publish(active.sequence.tokens)
        self._record(groups, actives, trees, verdicts, feeds, phases["forward"])
        for delta in deltas:
            if delta.id in self._boxes:
                self._boxes[delta.id].append(delta)
        try:
            self._observe(actives, feeds, starts, trees, verdicts, scores, wants)
        finally:
            for active in actives:
                if active.sequence.finish_reason is not None and active.sequence.id in self._active:
                    self._finish(active)
        self._measure(actives, feeds, deltas, time.perf_counter() - started, phases)
        return deltas

    def _known(self, sequence: Sequence) -> list[int]:
        """Pages of the prefix cache that hold more of the text than it has itself; none if there are none."""
        rows, active = sequence.rows, self._active[sequence.id]
        pages, size = rows.known(sequence.tokens), rows.pool.page_size
        if active.judged is not None and active.judges:  # rows that judge the tokens behind them have to be fed
            pages = pages[: (len(active.judged) - 1) // size]
        if len(pages) * size > rows.length and active.drafter.wants:
            pages = pages[: self._followed(active, len(pages) * size) // size]
        return pages if len(pages) * size > rows.length else []

    def _followed(self, active: _Active, length: int) -> int:
        """Of how many of the text's first `length` tokens the drafter needs no hidden states."""
        drafter = active.drafter
        if not isinstance(drafter, Follower):
            return 0
        try:
            return drafter.follows(active.request, length)
        except Exception as error:
            self._give_up([active], error)
            return length

    def _reuse(self, sequence: Sequence) -> None:
        """Take over what the prefix cache has of the text, beyond the rows that it has itself."""
        active, rows = self._active[sequence.id], sequence.rows
        if active.cached is None and self._prefix_caching:
            active.cached = 0
            self.prefix_queries += len(sequence.tokens)
        pages = self._known(sequence)
        if not pages:
            return
        before = rows.length
        rows.adopt(pages)
        if not active.preempted:
            active.cached = (active.cached or 0) + rows.length - before
            self.prefix_hits += rows.length - before
        if isinstance(active.drafter, Follower):
            try:
                active.drafter.skip(active.request, rows.length)
            except Exception as error:
                self._give_up([active], error)

    def _propose(self, turns: Seq[Turn], actives: Seq[_Active]) -> tuple[list[Tree | None], list[_Group]]:
        """A tree per turn, its rows reserved; None where the feed does not reach the last token. And who drafted."""
        trees: list[Tree | None] = [Tree.root(t.sequence.tokens[-1]) if t.scored else None for t in turns]
        groups: dict[int, _Group] = {}
        self._controller.begin({active.drafter.name for active in actives} - {"none"}, len(turns))
        for index, (turn, active) in enumerate(zip(turns, actives, strict=True)):
            active.asked = False
            # the first token comes before the first guess: no draft may make it wait
            if turn.scored and turn.rows == 1 and turn.sequence.output_length and active.drafter.name != "none":
                active.request.budget = active.max_guesses
                if active.max_guesses and turn.sequence.room() > 1:
                    group = groups.setdefault(id(active.drafter), _Group(active.drafter))
                    # under rejection the text depends on the guesses: nothing that was measured may choose them
                    if active.request.rejection:
                        group.members.append(index)
                        continue
                    group.paced.append(active.sequence.id)
                    if self._controller.wants(active.drafter.name, active.sequence.id):
                        group.members.append(index)
                    elif turn.sequence.shaping.grammar is not None:  # what it forces costs nobody's time
                        trees[index] = self._checked(turn, active, Tree.root(turn.sequence.tokens[-1]))
        for group in groups.values():
            if not group.members:
                continue
            for i in group.members:
                actives[i].asked = True
            started = time.perf_counter()
            try:
                proposals = group.drafter.propose([actives[i].request for i in group.members])
                checked = [
                    self._checked(turns[i], actives[i], t) for i, t in zip(group.members, proposals, strict=True)
                ]
            except Exception as error:
                self._give_up([actives[i] for i in group.members], error)
                group.members.clear()
                continue
            group.seconds = time.perf_counter() - started
            for i, tree in zip(group.members, checked, strict=True):
                trees[i] = tree
            group.proposed = checked
        return self._choose(turns, actives, trees), list(groups.values())

    def _choose(self, turns: Seq[Turn], actives: Seq[_Active], trees: Seq[Tree | None]) -> list[Tree | None]:
        """What is worth checking of the proposals, and fits into the pages."""
        # what a grammar forces is certain: nothing that was measured of a drafter says anything of it
        names = [active.drafter.name if active.asked and not active.request.rejection else None for active in actives]
        chosen = self._controller.choose(trees, names, sum(turn.rows for turn in turns))
        return [self._fitting(turn, tree) for turn, tree in zip(turns, chosen, strict=True)]

    def _record(
        self,
        groups: Seq[_Group],
        actives: Seq[_Active],
        trees: Seq[Tree | None],
        verdicts: Seq[Verdict | ValueError | None],
        feeds: Seq[Feed],
        seconds: float,
    ) -> None:
        """Tell the controller what this step cost and what it brought."""
        drafts = []
        for group in groups:
            judged = []
            for i, proposed in zip(group.members, group.proposed, strict=True):
                tree, verdict = trees[i], verdicts[i]
                if tree is not None and isinstance(verdict, Verdict) and not actives[i].request.rejection:
                    said = [draw.token for draw in verdict.draws]
                    judged.append((actives[i].sequence.id, tree, len(verdict.path), proposed, said))
            if judged:
                spent = group.seconds + len(judged) * self._observing.get(group.drafter.name, 0.0)
                drafts.append(Drafted(group.drafter.name, spent, *zip(*judged, strict=True)))
        rows = sum(len(feed.pending) + (feed.tree.guesses if feed.tree else 0) for feed in feeds)
        self._controller.record(rows, any(len(feed.pending) > 1 for feed in feeds), seconds, drafts)
        self._controller.settle((group.drafter.name, group.paced) for group in groups if group.paced)

    def _measure(
        self,
        actives: Seq[_Active],
        feeds: Seq[Feed],
        deltas: Seq[Delta],
        seconds: float,
        phases: Mapping[str, float],
    ) -> None:
        """Add a step to the speed, if it did nothing but decode."""
        trees = [feed.tree for feed in feeds if feed.tree is not None and len(feed.pending) == 1]
        tokens = sum(len(delta.tokens) for delta in deltas)
        if tokens and len(trees) == len(feeds) == len(deltas):
            self._speedometer.record(
                texts=len(trees),
                guesses=sum(tree.guesses for tree in trees),
                wanted=any(active.drafter.name != "none" for active in actives),
                tokens=tokens,
                seconds=seconds,
                beside=seconds - phases["draft"] - phases["forward"],
            )

    def _give_up(self, actives: Seq[_Active], error: Exception) -> None:
        """A drafter has failed: its requests go on without, which changes no text. Told once per drafter."""
        name = actives[0].drafter.name
        self._controller.failed(name, len(actives))
        told = f"drafter {name}: {type(error).__name__}: {error}"
        for active in actives:
            active.drafter_error = told
            drafter, active.drafter = active.drafter, self._drafters["none"]
            self._controller.forget(name, active.sequence.id)
            with suppress(Exception):  # it is broken already
                drafter.forget(active.sequence.id)
        if name not in self._blamed:
            self._blamed.add(name)
            warnings.warn(f"{told}; its requests go on without a drafter", RuntimeWarning, stacklevel=2)

    def _forget(self, active: _Active) -> None:
        self._controller.forget(active.drafter.name, active.sequence.id)
        try:
            active.drafter.forget(active.sequence.id)
        except Exception as error:
            self._give_up([active], error)

    def _checked(self, turn: Turn, active: _Active, tree: Tree) -> Tree:
        """The part of a proposal that can count: a sound tree within the room of the text and the budget."""
        sequence = turn.sequence
        grammar = sequence.shaping.grammar
        if len(tree) == 1 and (grammar is None or active.drafter.name == "none"):
            return Tree.root(sequence.tokens[-1])
        budget, depth = active.request.budget, sequence.room() - 1
        tree = tree.check(self.config.vocabulary).cut(budget).shallow(depth)
        if isinstance(grammar, Grammar):
            tree = grammar.fit(tree, budget=budget, depth=depth, rejection=active.request.rejection)
        if tree.tokens[0] != sequence.tokens[-1]:
            raise ValueError(f"{active.drafter.name}: the root is token {tree.tokens[0]}, not the text's last token")
        return tree

    def _fitting(self, turn: Turn, tree: Tree | None) -> Tree | None:
        """The tree, its rows reserved; the root alone where the pages do not suffice."""
        if tree is None or not tree.guesses:
            return tree
        try:
            turn.sequence.rows.reserve(turn.rows + tree.guesses)
        except CacheFullError:
            return tree.cut(0)
        return tree

    def _near(self, active: _Active, feed: Feed) -> bool:
        """Whether the drafter is to see what comes of the text: not while it is far from being asked."""
        if active.request.rejection:
            return True
        return self._controller.near(active.drafter.name, active.sequence.id, prompt=len(feed.pending) > 1)

    def _wants(self, actives: Seq[_Active], feeds: Seq[Feed]) -> tuple[int, ...]:
        looking = [active for active, feed in zip(actives, feeds, strict=True) if self._near(active, feed)]
        return tuple(sorted({layer for active in looking for layer in active.drafter.wants}))

    def _verdict(
        self, active: _Active, feed: Feed, tree: Tree | None, scores: Scores, index: int
    ) -> Verdict | ValueError | None:
        """What the target says of the tree; None of a prefill chunk; the error where it can say nothing."""
        try:
            _judge(active, feed, scores, index)
            return None if tree is None else self._verify(active, tree, scores, index)
        except (DrawError, LawError) as error:
            return error

    def _fail(self, active: _Active, error: ValueError) -> Delta:
        """End a request that cannot go on. Its error comes with `result`."""
        id = active.sequence.id
        self._finish(active)
        self._failures[id] = error
        return Delta(id, (), (), "", finish_reason="error")

    def _verify(self, active: _Active, tree: Tree, scores: Scores, feed: int) -> Verdict:
        shaping = active.sequence.shaping

        def path(node: int) -> tuple[int, ...]:
            return tuple(tree.tokens[n] for n in tree.path(node))

        if active.request.rejection:
            return verify.reject_with_noise(tree, scores, feed, shaping)

        def draw(node: int) -> Draw:
            return scores.draw(feed, node, shaping, path(node) if node else ())

        return verify.match(tree, draw)

    def _extend(self, active: _Active, tree: Tree, verdict: Verdict, now: float) -> Delta:
        sequence = active.sequence
        before = sequence.output_length
        cut = sequence.extend(verdict.draws)
        closing: Origin = "plain"
        if tree.guesses:
            last = verdict.path[-1] if verdict.path else 0
            closing = "corrected" if last in tree.parents else "bonus"
        drafted: list[Origin] = ["drafted"] * len(verdict.path)
        origins = (*drafted, closing)[: cut.kept]
        active.origins += origins
        active.accepted += min(len(verdict.path), cut.kept)
        step = _step(tree, verdict, active)
        active.steps.append(step)
        if active.first is None:
            active.first = now
        active.last = now
        return Delta(
            id=sequence.id,
            tokens=tuple(sequence.tokens[sequence.shaping.prompt_length + before :]),
            origins=origins,
            text=active.text.take(),
            logprobs=_logprobs(sequence.draws[before:]),
            finish_reason=cast("FinishReason | None", sequence.finish_reason),
            step=step,
            prompt_logprobs=() if before else tuple(active.judged or ()),
        )

    def _observe(
        self,
        actives: Seq[_Active],
        feeds: Seq[Feed],
        starts: Seq[int],
        trees: Seq[Tree | None],
        verdicts: Seq[Verdict | ValueError | None],
        scores: Scores,
        wants: tuple[int, ...],
    ) -> None:
        groups: dict[int, list[Observation]] = {}
        members: dict[int, list[_Active]] = {}
        for index, (active, feed, verdict) in enumerate(zip(actives, feeds, verdicts, strict=True)):
            drafter = active.drafter
            if isinstance(verdict, ValueError) or drafter.name == "none":  # plain decoding has nothing to learn
                continue
            # what the forward kept was settled before the controller heard of this step
            if any(layer not in wants for layer in drafter.wants) or not self._near(active, feed):
                continue
            members.setdefault(id(drafter), []).append(active)
            groups.setdefault(id(drafter), []).append(
                Observation(
                    request=active.request,
                    scores=scores,
                    feed=index,
                    start=starts[index],
                    pending=len(feed.pending),
                    tree=trees[index],
                    path=verdict.path if verdict else (),
                    token=verdict.token if verdict else -1,
                    columns=tuple(wants.index(layer) for layer in drafter.wants),
                )
            )
        for key, observations in groups.items():
            drafter, began = members[key][0].drafter, time.perf_counter()
            try:
                drafter.observe(observations)
            except Exception as error:
                self._give_up(members[key], error)
            self._observing[drafter.name] = (time.perf_counter() - began) / len(observations)

    def _finish(self, active: _Active) -> None:
        sequence = active.sequence
        self._scheduler.drop(sequence)
        self._forget(active)
        del self._active[sequence.id]
        if sequence.finish_reason is None:
            return
        now = time.perf_counter()
        drafted = sum(step.drafted for step in active.steps)
        start = sequence.shaping.prompt_length
        self._results[sequence.id] = Result(
            id=sequence.id,
            prompt_tokens=list(sequence.tokens[:start]),
            tokens=list(sequence.tokens[start:]),
            origins=active.origins,
            text=active.text.text,
            finish_reason=cast("FinishReason", sequence.finish_reason),
            stop_reason=sequence.stop_reason,
            logprobs=None if sequence.shaping.params.logprobs is None else list(_logprobs(sequence.draws)),
            usage=Usage(start, sequence.output_length, active.accepted, drafted - active.accepted, active.cached or 0),
            steps=active.steps,
            seed=sequence.shaping.seed,
            ttft=(active.first or now) - active.admitted,
            seconds=(active.last or now) - active.admitted,
            timings=active.timings,
            drafter_error=active.drafter_error,
            drafter=active.drafter.name,
            max_draft_tokens=active.max_guesses,
            prompt_logprobs=active.judged,
        )


class Stream(Iterator[Delta]):
    """The deltas of one request. `close` (or leaving a `with`) cancels it; `result` stands after the end.

    Several streams, `generate` and `step` may take turns on one engine: each stream gets its own deltas, whoever made
    the step. An exception ends the stream and cancels its request.
    """

    def __init__(self, engine: Engine, id: int) -> None:
        self._engine, self.id = engine, id
        self.result: Result | None = None
        self._ready = engine._boxes.setdefault(id, [])

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        try:
            while not self._ready and self.id in self._engine._active:
                self._engine.step()
            delta = self._ready.pop(0) if self._ready else None
            if not self._ready and self.id not in self._engine._active:
                self._end()
        except BaseException:
            self.close()
            raise
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        if self.result is None:
            self._engine.cancel(self.id)
            self._engine._failures.pop(self.id, None)
            if self.id in self._engine._results:
                self._end()
            self._engine._boxes.pop(self.id, None)
            self._ready = []

    def _end(self) -> None:
        if self.result is None and self.id in self._engine._boxes:
            del self._engine._boxes[self.id]
            self.result = self._engine.result(self.id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(tree: Tree, verdict: Verdict, active: _Active) -> Step:
    if not tree.guesses:
        return Step(0, 0, 0, asked=active.asked)
    drafter = active.drafter.name if active.asked else FORCED
    named = tree.sources or ("",) * len(tree)
    sources = tuple(named[node] or drafter for node in verdict.path)
    return Step(tree.guesses, max(tree.depths()), len(verdict.path), drafter, sources, active.asked)


def _never(token: int) -> bool:
    return False


def _feed(turn: Turn, active: _Active, tree: Tree | None) -> Feed:
    """What a sequence gives to a step: the tokens of its turn, those of the prompt judged that are to be, the tree."""
    sequence = turn.sequence
    start = sequence.rows.length
    pending = sequence.tokens[start:][: turn.rows]
    if active.judged is None or not active.judges:
        return Feed(sequence.rows, pending, tree)
    first = max(start, len(active.judged) - 1)  # the row that says what comes after it
    judged = max(0, start + len(pending) - 1 - first)
    return Feed(sequence.rows, pending, tree or Tree.root(pending[-1]), judged)


def _judge(active: _Active, feed: Feed, scores: Scores, index: int) -> None:
    """Note the log-probabilities of the prompt's tokens that this step fed the ones before. Raises DrawError."""
    shaping = active.sequence.shaping
    k = shaping.params.prompt_logprobs
    if active.judged is None or k is None:
        return
    root = feed.rows.length + len(feed.pending) - 1
    for row in range(len(active.judged) - 1, min(root, shaping.prompt_length - 2) + 1):
        said = scores.describe(index, row - root, shaping.tokens[row + 1], k)
        assert said.logprob is not None
        active.judged.append(TokenLogprobs(said.token, said.logprob, said.top))


def _check_floor(least: float | None, verify: Verify) -> None:
    if least is None:
        return
    if isinstance(least, bool) or not isinstance(least, int | float) or not 0 < least <= 1:
        raise ParameterError("min_acceptance", f"{least!r} is not a number in (0, 1]")
    if verify == "rejection":
        raise ParameterError(
            "min_acceptance", "under rejection the text depends on the guesses, so nothing measured may stop them"
        )


def _logprobs(draws: Seq[Draw]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(d.token, d.logprob, d.top) for d in draws if d.logprob is not None)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many? A text, token ids and chat messages are one; a list of those is many."""
    if not _is_sequence(prompts) or isinstance(prompts, str):
        return [cast("Prompt", prompts)]
    if len(prompts) and isinstance(prompts[0], Integral | Mapping):
        return [cast("Prompt", prompts)]
    return list(cast("Seq[Prompt]", prompts))


def _is_sequence(value: object) -> bool:
    """Whether it is a list of something: also an array of numpy, which is no `Sequence`."""
    return not isinstance(value, bytes | Mapping | Set) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _per_prompt(name: str, value: T | Seq[T] | None, default: T, count: int) -> list[T]:
    if value is None:
        return [default] * count
    if isinstance(value, Seq):
        if len(value) != count:
            raise ParameterError(name, f"{len(value)} of them for {count} prompts")
        return list(value)
    return [value] * count
