"""Our engine on Ray Serve: `serve run outrider.scale.ray:app model=smollm2-135m`, or `outrider serve --ray`.

Two deployments: `Engine`, whose replicas are an `outrider serve` each and scale with the requests that wait, and the
`Gateway` before them, which keeps a conversation at the replica whose cache has its beginning. Needs `ray[serve]`.

Sources: Ray Serve's guides on application builders, autoscaling, and custom request routing (consistent hashing).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from outrider.scale.deployment import Options
from outrider.scale.gateway import Gateway
from outrider.scale.replica import Head, Replica, ReplicaError, Request, command_of
from outrider.server.errors import ApiError

__all__ = ["Options", "app", "run"]

log = logging.getLogger("outrider.scale")

APPLICATION = "outrider"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Engine:
    """A replica: one `outrider serve` beside it."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Ray awaits it
        model = [] if options.model is None else [f"--model={options.model}"]
        words = [*options.options, *model, f"--drain-seconds={options.drain_seconds}"]
        self._command = command_of(words, _replica_name())
        self._starting = asyncio.Lock()
        self._replica = await Replica.start(self._command)

    async def _running(self) -> Replica:
        """The replica, begun anew if its process has ended: that takes seconds, and whoever asks again waits for it."""
        async with self._starting:
            if not self._replica.alive:
                log.warning("the engine's process ended; it is started again")
                self._replica = await Replica.start(self._command)
            return self._replica

    async def check_health(self) -> None:
        """Raises where the process does not answer, or cannot begin anew: Ray then begins another replica."""
        await (await self._running()).check()

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        """The answer, as it comes."""
        async for part in (await self._running()).answer(request):
            yield part

    async def whole(self, request: Request) -> tuple[str, bytes]:
        """This replica's name, and the body of its answer."""
        parts = [part async for part in (await self._running()).answer(request) if isinstance(part, bytes)]
        return _replica_name(), b"".join(parts)

    async def __del__(self) -> None:
        """Ray calls this when the replica is to go, its requests being done."""
        await self._replica.stop()


class _Replicas:
    """The deployment's replicas as the gateway asks them."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def ask(self, request: Request, conversation: str) -> AsyncIterator[Head | bytes]:
        answer = self._handle.options(stream=True, session_id=conversation).answer.remote(request)
        try:
            async for part in answer:
                yield part
        except BackPressureError:
            raise ApiError(503, "all replicas are full", code="full", retry_after=1) from None
        except (ray.exceptions.RayActorError, ReplicaUnavailableError, RequestCancelledError) as error:
            raise ReplicaError(f"{type(error).__name__}: {error}") from None
        except ray.exceptions.RayTaskError as error:
            raise ReplicaError(str(error.cause)) from None
        finally:
            answer.cancel()  # of a client that has gone; nothing where the answer has ended

    async def all(self, request: Request) -> Sequence[tuple[str, bytes]]:
        response = self._handle.broadcast("whole", request)
        return list(await response.results_async(timeout_s=30.0))


class Front:
    """The deployment that Ray's proxy calls."""

    def __init__(self, engines: DeploymentHandle, body_bytes: int) -> None:
        self._gateway = Gateway(_Replicas(engines), body_bytes)

    async def __call__(self, request: HttpRequest) -> Response:
        return await self._gateway(request)


def _replica_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def app(args: Options) -> serve.Application:
    """The application that `serve run outrider.scale.ray:app KEY=VALUE ...` starts."""
    most = args.max_replicas or max(1, args.replicas)
    engine = serve.deployment(Engine).options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.replicas, max_replicas=most, target_ongoing_requests=args.requests
        ),
        max_ongoing_requests=args.max_requests,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        ray_actor_options={"num_cpus": args.cpus},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=args.drain_seconds + 10.0,
    )
    front = serve.deployment(Front).options(
        name="Gateway",
        num_replicas=args.gateways,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.drain_seconds + 10.0,
    )
    return front.bind(engine.bind(args), args.body_bytes)


def run(options: Options, host: str, port: int) -> None:
    """Serve until a signal ends it: on the cluster of RAY_ADDRESS, or on this machine alone.

    A deployment that runs there already is renewed, replica by replica.
    """
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": host, "port": port})
    serve.run(app(options), name=APPLICATION, route_prefix="/", blocking=True)
