"""``foredraft serve``: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from foredraft.cli.options import DraftingOptions, EngineOptions, LoadingOptions, ModelChoice, takes_groups
from foredraft.cli.running import exit_codes, load_llm, read_text, say
from foredraft.config.engine import EngineConfig
from foredraft.errors import ConfigError
from foredraft.extras import install_command
from foredraft.serve.settings import (
    DETAILS,
    GRANULARITIES,
    LEAST_STALL_SECONDS,
    PARSERS,
    FailoverSettings,
    ServerSettings,
)

if TYPE_CHECKING:
    from foredraft.serve.served import Served

KEY_VARIABLE = "FOREDRAFT_API_KEY"
DEFAULTS = ServerSettings()


@takes_groups
def serve(
    *,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As --model.", show_default=False)] = None,
    model: ModelChoice,
    drafting: DraftingOptions,
    loading: LoadingOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; may be repeated.")
    ] = None,
    drafting_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--drafting",
            metavar="NAME=METHOD|JSON",
            help="Another way of drafting for the same model in memory, served under this name; may be repeated.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help=f"Key that clients must send; may be repeated. Also {KEY_VARIABLE}, or --api-key-file.",
        ),
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="Keys, one on each line.")] = None,
    cors_origins: Annotated[
        list[str] | None, typer.Option(help="Web page that may call the server; may be repeated, * is every one.")
    ] = None,
    rows: Annotated[EngineOptions, "max_num_seqs", "max_model_len"],
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of keys and values: 500MB, 2GB, 40% of what is free, or none for no limit. By default 40%, "
            "shared by all ways of drafting and replicas.",
            show_default=False,
        ),
    ] = None,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that running rows wait for at once. By default 64 on a processor, where later prompts "
            f"then take over every token that they share, and {EngineConfig.prefill_chunk_size} on a GPU.",
            show_default=False,
        ),
    ] = None,
    num_cached_prefixes: Annotated[
        int, typer.Option(help="Texts whose prompts are kept for others that begin like them; 0 keeps none.")
    ] = 8,
    max_queued_requests: Annotated[
        int, typer.Option(min=-1, help="Requests that may wait; more get 429. -1 is no limit.")
    ] = DEFAULTS.max_queued_requests or 0,
    max_queued_tokens: Annotated[int, typer.Option(min=-1, help="Tokens of their prompts; -1 is no limit.")] = -1,
    max_body_bytes: Annotated[int, typer.Option(help="Size of a request; more gets 413.")] = DEFAULTS.max_body_bytes,
    max_n: Annotated[int, typer.Option(help="Samples of a prompt.")] = DEFAULTS.max_n,
    max_logprobs: Annotated[
        int, typer.Option(help="Most likely tokens that may be asked for.")
    ] = DEFAULTS.max_logprobs,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = DEFAULTS.request_timeout,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that requests have left after Ctrl-C or SIGTERM.")
    ] = DEFAULTS.shutdown_timeout,
    stream_granularity: Annotated[
        str, typer.Option(help=f"{' or '.join(GRANULARITIES)}: what a chunk of a stream holds.")
    ] = DEFAULTS.stream_granularity,
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option(help=f"{', '.join(DETAILS)}: counts of speculation with every answer.")
    ] = DEFAULTS.spec_decode_metrics,
    tool_call_parser: Annotated[
        str | None, typer.Option(help=f"{', '.join(PARSERS)}: format in which the model calls tools.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Template in place of the model's own.")
    ] = None,
    strict_fields: Annotated[bool, typer.Option("--strict-fields", help="Refuse fields that are not known.")] = False,
    enable_log_requests: Annotated[
        bool, typer.Option("--enable-log-requests", help="Write requests, prompts included, to the log.")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines in processes of their own, by Ray; texts outlive them.")
    ] = None,
    replica_cpus: Annotated[int, typer.Option(min=1, help="Processors, so threads, of each replica.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="Cluster that runs the replicas; by default one begins on this machine.")
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=LEAST_STALL_SECONDS,
            help="With --replicas: of silence, after which a replica loses its requests to others; by default "
            f"{FailoverSettings.stall_timeout:g}.",
        ),
    ] = None,
) -> None:
    """Serve a model to clients of the OpenAI API: chat, completions, streams with one token per chunk, metrics.

    One model is loaded; requests share its batches. Ctrl-C and SIGTERM let requests come to their end, a second one
    does not wait. Keys given on the command line can be seen by other users of the machine.
    """
    with exit_codes():
        try:
            from foredraft.serve.served import ServedModels, default_share, with_kv_limit
            from foredraft.serve.server import Server
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"foredraft serve needs {error.name}; install it with: {install_command('serve')}"
            ) from None
        chosen = replace(model, model=name).chosen() if name is not None else model.chosen()
        if name is not None and model.model not in (None, name):
            raise ConfigError(f"the model is {name!r} and --model {model.model!r}; give one")
        names = served_model_name or [chosen]
        settings = ServerSettings(
            api_keys=_keys(api_key, api_key_file),
            cors_origins=tuple(cors_origins or ()),
            max_body_bytes=max_body_bytes,
            max_n=max_n,
            max_logprobs=max_logprobs,
            max_queued_requests=None if max_queued_requests < 0 else max_queued_requests,
            max_queued_tokens=None if max_queued_tokens < 0 else max_queued_tokens,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            strict_fields=strict_fields,
            stream_granularity=stream_granularity,
            spec_decode_metrics=per_request_spec_decode_metrics,
            tool_call_parser=tool_call_parser,
            log_requests=enable_log_requests,
        )
        template = None if chat_template is None else read_text(chat_template)
        offer = ServedModels.of(names, drafting_setting or (), template)
        config = drafting.config(loading.profile_file)
        chunk_size = _chunk_size(loading.device) if prefill_chunk_size is None else prefill_chunk_size
        kept = {
            "num_cached_prefixes": num_cached_prefixes,
            "gguf_file": model.gguf_file,
            "prefill_chunk_size": chunk_size,
            "max_kv_bytes": max_kv_bytes,
        }
        options = {**vars(loading), **vars(rows), **kept}
        if stall_timeout is not None and replicas is None and ray_address is None:
            raise typer.BadParameter("--stall-timeout is for replicas; give --replicas")
        if replicas is not None or ray_address is not None:
            from foredraft.serve.ray import check_ray
            from foredraft.serve.ray.config import ClusterConfig
            from foredraft.serve.ray.launch import serve_cluster

            check_ray(ray_address)
            cluster = ClusterConfig(
                model=chosen,
                speculative_config=config,
                drafting=tuple(drafting_setting or ()),
                served_model_name=tuple(names),
                chat_template=template,
                llm=options,
                server=vars(settings),
                failover={} if stall_timeout is None else {"stall_timeout": stall_timeout},
                num_replicas=replicas or 1,
                num_cpus=replica_cpus,
            )
            if max_kv_bytes is None:
                share = default_share(cluster.num_engines)
                say(f"keys and values: {share} of the free memory at most for each engine; --max-kv-bytes sets it")
            serve_cluster(cluster, ray_address, host=host, port=port, say=say)
            return

        offer.check_files()

        def load() -> Served:
            return offer.over(load_llm(chosen, config, **with_kv_limit(options, offer.num_engines)))

        server = Server(load, names[0], settings, host=host, port=port, say=say)
        if not server.run_until_end():
            _leave()


def _leave() -> NoReturn:
    """End this process at once, with status 0, around a thread that computes: see `Server.run_until_end`."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _chunk_size(device: str) -> int:
    """Tokens of a chunk of a prompt, unless the user says: on a processor as many as its kernels of steps take."""
    from foredraft.loading.models import choose_device
    from foredraft.native.abi import MOST_NODES

    return MOST_NODES if choose_device(device).type == "cpu" else EngineConfig.prefill_chunk_size


def _keys(given: list[str] | None, file: str | None) -> tuple[str, ...]:
    """Keys of the options, of the file and of the environment.

    Raises: ConfigError for a file that cannot be read, or has no keys.
    """
    keys = list(given or ())
    if KEY_VARIABLE in os.environ:
        keys.append(os.environ[KEY_VARIABLE])
    if file is not None:
        lines = [line.strip() for line in read_text(file).splitlines()]
        if not any(lines):
            raise ConfigError(f"{file} holds no keys; write one on each line")
        keys += [line for line in lines if line]
    return tuple(keys)
