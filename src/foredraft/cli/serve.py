"""``foredraft serve``: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from foredraft.cli.help import DRAFTING, LIMITS, OUTPUT
from foredraft.cli.options import DraftingOptions, EngineOptions, LoadingOptions, ModelChoice, takes_groups
from foredraft.cli.running import exit_codes, hide_loading, load_llm, read_text, say, show_loading
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
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as in --model.", show_default=False)
    ] = None,
    model: ModelChoice,
    drafting: DraftingOptions,
    loading: LoadingOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Model name for requests; may be repeated.")
    ] = None,
    drafting_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--drafting",
            metavar="NAME=METHOD|JSON",
            hidden=True,
            rich_help_panel=DRAFTING,
            help="Serve the same model under another name with another drafting method; may be repeated.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            show_default=False,
            help=f"Key that clients must send; also {KEY_VARIABLE}.",
        ),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", hidden=True, help="File of API keys, one per line.")
    ] = None,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", hidden=True, help="Web page that may call the server, or *; may be repeated."),
    ] = None,
    rows: Annotated[EngineOptions, "max_num_seqs", "max_model_len"],
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=LIMITS,
            help="Memory for keys and values: 500MB, 2GB, 40% or none. Default: 40% of the available memory.",
            show_default=False,
        ),
    ] = None,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(
            hidden=True,
            rich_help_panel=LIMITS,
            help="Prompt tokens that are read in one pass while other sequences wait. Default: 64 on a CPU, where "
            f"later prompts then share every common token; {EngineConfig.prefill_chunk_size} on a GPU.",
            show_default=False,
        ),
    ] = None,
    num_cached_prefixes: Annotated[
        int,
        typer.Option(
            rich_help_panel=LIMITS,
            help="Number of finished requests whose cache is kept for prompts with the same beginning.",
        ),
    ] = 8,
    max_queued_requests: Annotated[
        int,
        typer.Option(
            min=-1, rich_help_panel=LIMITS, help="Limit on waiting requests; requests beyond it get 429. -1: no limit."
        ),
    ] = DEFAULTS.max_queued_requests or 0,
    max_queued_tokens: Annotated[
        int,
        typer.Option(
            min=-1,
            hidden=True,
            rich_help_panel=LIMITS,
            help="Limit on prompt tokens of waiting requests; -1: no limit.",
        ),
    ] = -1,
    max_body_bytes: Annotated[
        int,
        typer.Option(hidden=True, rich_help_panel=LIMITS, help="Limit on bytes of a request; larger requests get 413."),
    ] = DEFAULTS.max_body_bytes,
    max_n: Annotated[
        int, typer.Option(hidden=True, rich_help_panel=LIMITS, help="Limit on samples per prompt.")
    ] = DEFAULTS.max_n,
    max_logprobs: Annotated[
        int, typer.Option(hidden=True, rich_help_panel=LIMITS, help="Limit on alternatives per token (top_logprobs).")
    ] = DEFAULTS.max_logprobs,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", rich_help_panel=LIMITS, help="Longest time per request.")
    ] = DEFAULTS.request_timeout,
    shutdown_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", hidden=True, rich_help_panel=LIMITS, help="Time for requests after Ctrl-C."),
    ] = DEFAULTS.shutdown_timeout,
    stream_granularity: Annotated[
        str,
        typer.Option(
            metavar="|".join(GRANULARITIES), hidden=True, rich_help_panel=OUTPUT, help="Content of a chunk of a stream."
        ),
    ] = DEFAULTS.stream_granularity,
    per_request_spec_decode_metrics: Annotated[
        str,
        typer.Option(
            metavar="|".join(DETAILS),
            hidden=True,
            rich_help_panel=OUTPUT,
            help="Add counts of drafting to every answer.",
        ),
    ] = DEFAULTS.spec_decode_metrics,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(metavar="|".join(PARSERS), rich_help_panel=OUTPUT, help="Format in which the model calls tools."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", hidden=True, help="Chat template to use instead of the model's.")
    ] = None,
    strict_fields: Annotated[bool, typer.Option("--strict-fields", hidden=True, help="Refuse unknown fields.")] = False,
    enable_log_requests: Annotated[
        bool,
        typer.Option("--enable-log-requests", hidden=True, rich_help_panel=OUTPUT, help="Log requests with prompts."),
    ] = False,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log/--no-access-log", rich_help_panel=OUTPUT, help="Log every request, and the throughput."
        ),
    ] = True,
    replicas: Annotated[
        int | None, typer.Option(min=1, hidden=True, help="Number of engines in processes of their own, run by Ray.")
    ] = None,
    replica_cpus: Annotated[
        int, typer.Option(min=1, hidden=True, help="Processors, and threads, of each replica.")
    ] = 1,
    ray_address: Annotated[
        str | None, typer.Option(hidden=True, help="Ray cluster of the replicas. Default: one on this machine.")
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=LEAST_STALL_SECONDS,
            hidden=True,
            help="With --replicas: silence after which the requests of a replica move to other replicas. Default: "
            f"{FailoverSettings.stall_timeout:g}.",
        ),
    ] = None,
) -> None:
    """Serve a model to clients of the OpenAI API.

    The server has chat, completions, responses, metrics and a web page. Ctrl-C waits for running requests; a second
    one stops at once.

    Examples:
      foredraft serve
      foredraft serve path/to/model --port 9000 --api-key secret
    """
    with exit_codes():
        chosen = model.named(name).chosen()
        show_loading(chosen)
        try:
            from foredraft.serve.served import ServedModels, default_share, with_kv_limit
            from foredraft.serve.server import Server
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"foredraft serve needs {error.name}; install it with: {install_command('serve')}"
            ) from None
        names = served_model_name or [chosen]
        settings = ServerSettings(
            api_keys=read_keys(api_key, api_key_file),
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
            access_log=access_log,
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
            raise typer.BadParameter("--stall-timeout needs --replicas")
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
                say(f"each engine may use {share} of the available memory for keys and values (--max-kv-bytes)")
            hide_loading()
            serve_cluster(cluster, ray_address, host=host, port=port, say=say)
            return

        offer.check_files()

        def load() -> Served:
            return offer.over(load_llm(chosen, config, **with_kv_limit(options, offer.num_engines)))

        server = Server(load, names[0], settings, host=host, port=port, say=say)
        if not server.run_until_end():
            _leave()


def _leave() -> NoReturn:
    """End this process at once with status 0, although a thread is computing; see `Server.run_until_end`."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _chunk_size(device: str) -> int:
    """Default tokens per chunk of a prompt: on a CPU the most that the kernels of a step take."""
    from foredraft.loading.models import choose_device
    from foredraft.native.abi import MOST_NODES

    return MOST_NODES if choose_device(device).type == "cpu" else EngineConfig.prefill_chunk_size


def read_keys(given: list[str] | None, file: str | None) -> tuple[str, ...]:
    """API keys from options, file and environment.

    Raises: ConfigError for a file that cannot be read or has no keys.
    """
    keys = list(given or ())
    if KEY_VARIABLE in os.environ:
        keys.append(os.environ[KEY_VARIABLE])
    if file is not None:
        lines = [line.strip() for line in read_text(file).splitlines()]
        if not any(lines):
            raise ConfigError(f"{file} has no keys; write one per line")
        keys += [line for line in lines if line]
    return tuple(keys)
