"""The command line: ``slipstream --help``. A composition root: each command joins parts that do not know each other.

What is heavy (torch, gRPC, the services) is imported by the command that needs it, so that help comes at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream import __version__
from slipstream.base.config import Config, load
from slipstream.base.errors import InvalidRequest, SlipstreamError, Unavailable
from slipstream.cli.options import ConfigFile, Overrides, key_in
from slipstream.cli.terminal import ask, checks_table, complain, plain_table
from slipstream.cli.train_head import train_head
from slipstream.cli.tune import tune
from slipstream.models.shipped import settled

Logs = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where services log; else a new temporary folder.")]

app = typer.Typer(
    name="slipstream", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Speculative decoding as services: a draft proposes, a target decides, a router answers.\n\n"
         "Start with `slipstream run`: it prepares a small model, starts all services, and answers a question.",
)
models_app = typer.Typer(no_args_is_help=True, help="Prepare and list models.\n\nExample: `slipstream models list`")
app.add_typer(models_app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """What every command takes."""


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="The question; a default one shows drafts at work.")] = None,
    once: Annotated[bool, typer.Option("--once", "--exit", help="End after the answer instead of serving on.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    config: ConfigFile = None, overrides: Overrides = None, logs: Logs = None,
) -> None:
    """Start everything on this machine, answer a question, and serve until Ctrl-C.

    Examples:

    `slipstream run`

    `slipstream run "Why is the sky blue?" --once`

    `slipstream run --set router.listen=127.0.0.1:8080 --logs logs`
    """
    from slipstream.cli.host import PROMPT, first_answer, launched, require_model, serve_until_stopped, show_places

    settings, console = _settings(config, overrides), Console()
    require_model(settings)
    with launched(settings, logs, console) as launch:
        first_answer(launch, console, prompt or PROMPT, max_tokens)
        if not once:
            show_places(launch, console)
            serve_until_stopped(launch, console)


@app.command()
def serve(
    colocated: Annotated[bool, typer.Option("--colocated", help="One process, the drafter in the target.")] = False,
    config: ConfigFile = None, overrides: Overrides = None, logs: Logs = None,
) -> None:
    """Start draft, target and router on this machine and serve until Ctrl-C, which drains.

    Examples:

    `slipstream serve`

    `slipstream serve --colocated --set draft.drafter=ngram`
    """
    from slipstream.cli.host import launched, require_model, serve_until_stopped, show_places

    settings, console = _settings(config, overrides), Console()
    require_model(settings)
    if colocated:
        _foreground("slipstream.cli.colocated", settings.on_one_machine())
        return
    with launched(settings, logs, console) as launch:
        show_places(launch, console)
        serve_until_stopped(launch, console)


@app.command()
def draft(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the draft service in the foreground.

    Example: `slipstream draft --set draft.listen=127.0.0.1:50052 --set draft.drafter=ngram`
    """
    _foreground("draft_service.__main__", _settings(config, overrides))


@app.command()
def target(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the target service in the foreground.

    Example: `slipstream target --set model.path=smollm2-135m --set target.drafts=[127.0.0.1:50052]`
    """
    _foreground("target_service.__main__", _settings(config, overrides))


@app.command()
def router(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the router in the foreground.

    Example: `slipstream router --set router.targets=[127.0.0.1:50051] --set router.api_keys_file=keys.txt`
    """
    _foreground("router_service.__main__", _settings(config, overrides))


@app.command()
def chat(
    address: Annotated[str, typer.Option(help="gRPC address of a router (`router.grpc_listen`).")] = "127.0.0.1:8001",
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File whose first line is the key.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
) -> None:
    """Talk to a running router; tokens that came from drafts stand out.

    Examples:

    `slipstream chat`

    `echo "Name three rivers." | slipstream chat --temperature 0`
    """
    from slipstream.cli.conversation import Conversation
    from slipstream.wire.client import Client

    with Client(address, api_key=key_in(api_key_file)) as client:
        try:
            model = client.models()[0]
        except Unavailable as error:
            raise Unavailable(f"no router answers over gRPC at {address}\nstart one with: slipstream run\nor give the "
                              f"address that its router.grpc_listen says, with --address\n({error})") from error
        except InvalidRequest as error:
            raise Unavailable(f"{address} asks for an API key; give the file that has it with --api-key-file FILE\n"
                              f"({error})") from error
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        Conversation(Console(), client, model, ask, options).run()


@app.command()
def doctor(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Check what this machine has and what is missing. Exit code 1 if something keeps Slipstream from running.

    Example: `slipstream doctor`
    """
    from slipstream.cli.doctor import checks

    found = checks(_settings(config, overrides))
    Console().print(checks_table((check.status, check.name, check.found, check.advice) for check in found))
    if any(check.status == "fail" for check in found):
        raise typer.Exit(1)


@app.command(name="config")
def show_config(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print all settings in force as YAML, with what each one means. What it prints is a valid --config file.

    Example: `slipstream config --set target.policy.max_nodes=8 > slipstream.yaml`
    """
    from slipstream.cli.manual import config_yaml

    print(config_yaml(load(config, tuple(overrides or ()))), end="")


app.command()(tune)
app.command(name="train-head")(train_head)


@app.command()
def simulate(
    schedule: Annotated[str, typer.Option(help="plain, colocated, serial or run-ahead; all: one row each.")] = "all",
    targets: Annotated[int, typer.Option(min=1)] = 1,
    drafts: Annotated[int, typer.Option(min=1)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Streams of each target.")] = 1,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="Network round trip between target and draft.")] = 1.0,
    step_ms: Annotated[float, typer.Option(min=0.01, help="A target step of few rows.")] = 20.0,
    draft_ms: Annotated[float, typer.Option(min=0.01, help="A whole tree of one batch.")] = 5.0,
    acceptance: Annotated[str, typer.Option(help="Chance that a node's first, second, ... child is right.")] =
    "0.75,0.12,0.05",
    seconds: Annotated[float, typer.Option(min=1.0, help="Simulated time.")] = 30.0,
) -> None:
    """Predict what a deployment would do: the real scheduler, policy and protocol in simulated time.

    Example: `slipstream simulate --rtt-ms 5 --batch 8 --step-ms 25 --draft-ms 4`
    """
    from slipstream.base.config import LogSection
    from slipstream.observe.log import configure
    from slipstream.simulate.simulation import SCHEDULES, describe

    configure(LogSection(level="error"))
    names = SCHEDULES if schedule == "all" else (schedule,)
    rows = [describe(name, targets, drafts, batch, rtt_ms, step_ms, draft_ms, acceptance, seconds) for name in names]
    Console().print(plain_table(tuple(rows[0]), [tuple(row.values()) for row in rows]))


@app.command(hidden=True)
def docs(root: Annotated[Path, typer.Option(help="The checkout.")] = Path()) -> None:
    """Print the tables of docs/ from the code."""
    from slipstream.cli.manual import pages

    for page, text in pages(root).items():
        page.write_text(text, encoding="utf-8")
        print(page)


@models_app.command(name="list")
def list_known() -> None:
    """List the models that are known by name, and which of them are prepared.

    Example: `slipstream models list`
    """
    from slipstream.models.folder import list_models

    rows = [(model.name, "prepared" if model.prepared else "packaged" if model.packaged else "not installed",
             model.description, str(model.folder)) for model in list_models()]
    Console().print(plain_table(("name", "state", "what", "folder"), rows))


@models_app.command(name="prepare")
def prepare_known(
    name: Annotated[str, typer.Argument(
        help="A name that `slipstream models list` shows; with --dtype also a folder.")],
    folder: Annotated[Path | None, typer.Option(
        "--to", metavar="FOLDER", help="Else the user's cache folder; of a folder with --dtype: beside it.")] = None,
    dtype: Annotated[str, typer.Option(
        "--dtype", metavar="KIND", help="int8, bfloat16 or float32: a further folder with weights of that kind.")] = "",
) -> None:
    """Turn a packaged model into a folder that services load. Done once; the second call takes no time.

    Examples:

    `slipstream models prepare smollm2-135m`

    `slipstream models prepare smollm2-135m --dtype int8`, then `slipstream run --set model.path=FOLDER` with what it
    prints
    """
    from slipstream.models.folder import KNOWN, prepare, resolve

    if not dtype:
        print(prepare(name, folder))
        return
    from slipstream.engine.preparation import prepare_as

    source = prepare(name) if name in KNOWN else resolve(name)
    print(prepare_as(dtype, source, folder or source.with_name(f"{source.name}-{dtype}")))


def main() -> None:
    """The console script. Errors of Slipstream are one sentence and exit code 1."""
    try:
        app()
    except SlipstreamError as error:
        complain(error)
        sys.exit(1)


def _settings(config: Path | None, overrides: list[str] | None) -> Config:
    return settled(load(config, tuple(overrides or ())))


def _foreground(module: str, config: Config) -> None:
    """Run the ``serve`` of ``module`` in this process until a signal drains it."""
    import asyncio
    from importlib import import_module

    from slipstream.cli.launch import prepare_libraries
    from slipstream.cli.process import until_signalled
    from slipstream.observe.log import configure

    prepare_libraries(config)
    configure(config.log)
    asyncio.run(until_signalled(config, import_module(module).serve))
