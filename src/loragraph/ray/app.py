"""The Serve application: the front, and behind it the replicas with their router."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from loragraph.ray.deployments import AffineRouter, Ingress, Replica
from loragraph.ray.options import AppArgs

_N_MORE = 256  # requests of a replica beside those of the engine: lists, tokens, metrics
_FRONT_REQUESTS = 100_000


def application(args: AppArgs) -> Application:
    """Both deployments, bound; ConfigError for what the routes cannot be told."""
    args.server_config()
    n_requests = args.parallel + args.max_waiting + _N_MORE
    # Serve's decorator is annotated for uses with arguments alone.
    deployment: Any = serve.deployment
    routing: Any = {
        "request_router_class": AffineRouter,
        "request_routing_stats_period_s": args.report_interval,
    }
    # A line a request costs more than handing it on; replicas have an access log of their own.
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    replicas = deployment(Replica).options(
        name="Replica",
        logging_config=quiet,
        max_ongoing_requests=n_requests,
        graceful_shutdown_timeout_s=args.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        ray_actor_options={
            "num_cpus": args.cpus_per_replica,
            "num_gpus": args.gpus_per_replica,
        },
        request_router_config=RequestRouterConfig(**routing),
        **_scaling(args),
    )
    front = deployment(serve.ingress()(Ingress)).options(
        name="Front",
        logging_config=quiet,
        num_replicas=1,
        max_ongoing_requests=_FRONT_REQUESTS,
        graceful_shutdown_timeout_s=args.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,  # while it is gone nobody is served
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = front.bind(args, replicas.bind(args))
    return app


def _scaling(args: AppArgs) -> dict[str, Any]:
    """How many replicas, as options of a deployment."""
    if args.autoscale is None:
        return {"num_replicas": args.replicas}
    least, most = args.autoscale
    up = args.autoscale_up_delay
    config = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        initial_replicas=max(least, 1),
        target_ongoing_requests=max(1.0, 0.75 * args.parallel),
        upscale_delay_s=up,
        downscale_delay_s=args.autoscale_down_delay,
        # Serve's own for its own delay; below it, often enough to be in time.
        look_back_period_s=min(30.0, up),
        metrics_interval_s=min(10.0, up / 3),
    )
    return {"autoscaling_config": config}
