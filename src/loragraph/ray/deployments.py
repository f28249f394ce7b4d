"""The thin layer over Ray: actors, deployments, handles. What is decided is decided elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message, Scope

from loragraph.cluster.catalogue_copy import CatalogueCopy, HubLostError
from loragraph.cluster.catalogue_hub import CatalogueHub
from loragraph.errors import LoragraphError
from loragraph.ray.forward import Forwarder, ReplicaLostError
from loragraph.ray.front import Front
from loragraph.ray.hint import Hint
from loragraph.ray.member import Member
from loragraph.ray.options import AppArgs
from loragraph.ray.routing import Routing

NAMESPACE = "loragraph"
_ASK_ALL_S = 5.0
_HUB_ANSWERS_S = 30.0
_MAX_CALLS = 10_000  # of copies that wait for news


class CatalogueActor:
    """Runs the hub. It is named and detached; a new one goes on from the file."""

    def __init__(self, folder: str) -> None:
        self._hub = CatalogueHub(folder)

    async def poll(self, who: str, since: int, lease: bool, wait_s: float) -> dict[str, Any]:
        """See CatalogueHub."""
        return await self._hub.poll(who, since, lease=lease, wait_s=wait_s)

    async def change(self, op: str, name: str, what: dict[str, Any]) -> int:
        """See CatalogueHub."""
        return await self._hub.change(op, name, **what)


class RemoteHub:
    """The hub in its actor; see catalogue_copy.Hub. Starts the actor where there is none."""

    def __init__(self, args: AppArgs) -> None:
        self._args = args
        self._actor: ActorHandle[CatalogueActor] | None = None

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        """See CatalogueHub."""
        found = await self._asked("poll", who, since, lease, wait_s)
        assert isinstance(found, dict)
        return found

    async def change(
        self,
        op: str,
        name: str = "",
        *,
        content: Mapping[str, Any] | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        """See CatalogueHub."""
        what = {"content": content, "generation": generation, "mix": mix}
        return int(await self._asked("change", op, name, what))

    async def _asked(self, method: str, *args: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(catalogue_actor, self._args)
            async with asyncio.timeout(_HUB_ANSWERS_S):
                return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, LoragraphError):
                raise error.cause from None
            self._actor = None  # its start failed
            raise HubLostError(f"the catalogue failed: {error.cause!r:.200}") from error
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            raise HubLostError(f"the catalogue does not answer: {error!s:.200}") from error


def catalogue_actor(args: AppArgs) -> ActorHandle[CatalogueActor]:
    """The actor of a folder's catalogue, started by whoever asks first; blocks."""
    remote: Any = ray.remote(CatalogueActor)  # annotated as if it might be the class itself
    handle: ActorHandle[CatalogueActor] = remote.options(
        name=args.catalogue_name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=_MAX_CALLS,
        num_cpus=0,
    ).remote(str(args.catalogue_dir))
    return handle


class AffineRouter(RequestRouter):
    """Has `Routing` decide, by the hint that comes with each request."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve before anything else."""
        self._routing = Routing()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica a rank, best first."""
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        self._routing.update({id_: one.routing_stats for id_, one in by_id.items()})
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # after all were tried
        hint = pending_request.kwargs.get("hint")
        if not isinstance(hint, Hint):
            return [candidate_replicas]
        return [[by_id[id_]] for id_ in self._routing.order(hint)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Counts it."""
        hint = pending_request.kwargs.get("hint")
        if isinstance(hint, Hint):
            self._routing.sent(replica_id.unique_id, hint)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts it."""
        self._routing.ended(replica_id.unique_id)


class Replica:
    """The deployment of engines."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._member = Member(
            serve.get_replica_context().replica_id.unique_id, args, RemoteHub(args)
        )
        await self._member.open()

    async def asgi(
        self, scope: Scope, body: bytes, hint: Hint
    ) -> AsyncGenerator[list[Message], None]:
        """One request; see Member.serve."""
        answer = self._member.serve(scope, body, hint)
        try:
            async for batch in answer:
                yield batch
        finally:
            await answer.aclose()

    async def figures(self) -> dict[str, Any]:
        """For the whole's metrics and health."""
        return await self._member.figures()

    async def drain(self) -> None:
        """No new requests from now on."""
        self._member.drain()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Asked by Serve, for the router."""
        return await self._member.report()

    def check_health(self) -> None:
        """Asked by Serve; raises for a replica that has to be replaced."""
        self._member.check()

    async def __del__(self) -> None:
        """Called by Serve when it stops a replica, after its requests have ended."""
        await self._member.close()


class _HandleReplies:
    """A streamed call's batches, Ray's errors among them as ours."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        return self

    async def __anext__(self) -> Sequence[Message]:
        try:
            batch = await anext(self._response)
        except RayActorError as error:
            raise ReplicaLostError("the replica that had the request was lost") from error
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"the replica failed: {error!s:.200}") from error
        assert isinstance(batch, list)
        return batch

    def cancel(self) -> None:
        self._response.cancel()


class Ingress:
    """The deployment of the front."""

    def __init__(self, args: AppArgs, replicas: DeploymentHandle[Replica]) -> None:
        self._args = args
        self._replicas = replicas
        self._streams = replicas.options(stream=True)
        who = f"front-{serve.get_replica_context().replica_id.unique_id}"
        self._copy = CatalogueCopy(RemoteHub(args), who, args.catalogue_dir, lease=True)
        self._following: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> Front:
        """Called by Serve after the constructor."""
        forwarder = Forwarder(
            self._call, accept_s=self._args.accept_timeout, send_s=self._args.send_timeout
        )
        self._following = asyncio.ensure_future(self._copy.follow())
        return Front(self._args.server_config(), forwarder, self._copy, self._ask_all)

    def _call(self, scope: Scope, body: bytes, hint: Hint) -> _HandleReplies:
        return _HandleReplies(self._streams.asgi.remote(scope, body, hint=hint))

    async def _ask_all(self) -> list[dict[str, Any]]:
        try:
            found = await self._replicas.broadcast("figures").results_async(
                timeout_s=_ASK_ALL_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            raise ReplicaLostError(f"no replica answers: {error!s:.200}") from error
        return [one for one in found if isinstance(one, dict)]
