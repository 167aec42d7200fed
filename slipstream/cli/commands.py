"""The command line: ``slipstream --help``. A composition root: each command joins parts that do not know each other.

Each command imports its heavy modules (torch, gRPC, the services) itself, so that help is printed at once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from os.path import abspath
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from slipstream import __version__
from slipstream.base.config import DETECTED_SETTINGS, Config, Dtype, config_yaml, load
from slipstream.base.errors import ConfigError, InvalidRequest, SlipstreamError, Unavailable
from slipstream.cli.terminal import Conversation, print_error, print_table, read_line
from slipstream.models.folder import resolve_drafter


def in_home(given: str | Path) -> Path:
    return Path(os.path.expanduser(given))


def path(metavar: str, told: str, *names: str) -> Any:
    """An option for a path: shells leave the ~ of --logs=~/here."""
    return typer.Option(*names, metavar=metavar, parser=in_home, help=told)


ConfigFile = Annotated[Path | None, path("FILE", "YAML file with settings.", "--config")]
Overrides = Annotated[list[str] | None, typer.Option(
    "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated. `slipstream config` lists them.")]
Logs = Annotated[Path | None, path("FOLDER", "Where services log; else a new temporary folder.")]
MAX_MS = 60_000.0  # largest simulated time of one step, tree or round trip
STATUS_SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}

app = typer.Typer(
    name="slipstream", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Speculative decoding as services: a draft proposes, a target decides, a router answers.\n\n"
         "Start with `slipstream run`: it prepares a small model, starts all services, and answers a question.",
)
models_app = typer.Typer(no_args_is_help=True, help="Prepare and list models.\n\nExample: `slipstream models list`")
app.add_typer(models_app, name="models")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def root_options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                            help="Print it.")] = False,
) -> None:
    """The options of ``slipstream`` itself."""


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="The question; a default one shows drafts at work.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the answer instead of serving on.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    config: ConfigFile = None, overrides: Overrides = None, logs: Logs = None,
) -> None:
    """Start everything on this machine, answer a question, and serve until Ctrl-C.

    Examples:

    `slipstream run`

    `slipstream run "Why is the sky blue?" --once`

    `slipstream run --set router.listen=127.0.0.1:8080 --logs logs`
    """
    from slipstream.cli.host import (
        DEFAULT_PROMPT,
        first_answer,
        launched,
        require_model,
        require_packages,
        serve_until_stopped,
        show_addresses,
    )

    settings, console = _settings(config, overrides), Console()
    require_packages()
    require_model(settings)
    with launched(settings, logs, console) as launch:
        first_answer(launch, console, prompt or DEFAULT_PROMPT, max_tokens)
        if not once:
            show_addresses(launch, console)
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
    from slipstream.cli.host import launched, require_model, require_packages, serve_until_stopped, show_addresses

    if colocated and logs is not None:
        raise ConfigError("--logs: one process logs to its standard error; leave it out, or write 2>FILE instead")
    settings, console = _settings(config, overrides), Console()
    require_packages()
    require_model(settings)
    if colocated:
        _run_in_foreground("slipstream.cli.colocated", settings.on_one_machine())
        return
    with launched(settings, logs, console) as launch:
        show_addresses(launch, console)
        serve_until_stopped(launch, console)


@app.command()
def draft(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the draft service in the foreground.

    Example: `slipstream draft --set draft.listen=127.0.0.1:8052 --set draft.drafter=ngram`
    """
    _run_in_foreground("draft_service.__main__", _settings(config, overrides))


@app.command()
def target(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the target service in the foreground.

    Example: `slipstream target --set model.path=smollm2-135m --set 'target.drafts=[127.0.0.1:8052]'`
    """
    _run_in_foreground("target_service.__main__", _settings(config, overrides))


@app.command()
def router(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the router in the foreground.

    Example: `slipstream router --set 'router.targets=[127.0.0.1:8051]' --set router.api_keys_file=keys.txt`
    """
    _run_in_foreground("router_service.__main__", _settings(config, overrides))


@app.command()
def chat(
    address: Annotated[str, typer.Option(
        help="gRPC address of a router (`router.grpc_listen`), or https://HOST.")] = "127.0.0.1:8001",
    api_key_file: Annotated[Path | None, path("FILE", "File whose first key is taken.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
) -> None:
    """Talk to a running router; tokens that came from drafts stand out.

    Examples:

    `slipstream chat`

    `echo "Name three rivers." | slipstream chat --temperature 0`
    """
    from slipstream.cli.host import first_key
    from slipstream.wire.client import Client

    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is not UTF-8 becomes one wrong character, not an error
    with Client(address, api_key=first_key(api_key_file) if api_key_file else "") as client:
        try:
            model = client.models()[0]
        except Unavailable as error:
            raise Unavailable(f"no answer over gRPC from {address}: {error}\nif no router runs there, start one with: "
                              "slipstream run\nor give the address that its router.grpc_listen says, with --address"
                              ) from error
        except InvalidRequest as error:
            raise Unavailable(f"{address} asks for an API key; give the file that has it with --api-key-file FILE\n"
                              f"({error})") from error
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        num_failed = Conversation(Console(), client, model, read_line, options).run()
    if num_failed and not (sys.stdin is not None and sys.stdin.isatty()):  # a person has seen it
        raise typer.Exit(1)


@app.command()
def doctor(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Check what this machine has and what is missing. Exit code 1 if something keeps Slipstream from running.

    Example: `slipstream doctor`
    """
    from slipstream.cli.doctor import checks

    results = checks(load(config, tuple(overrides or ())))
    rows = [(Text(*STATUS_SIGNS[check.status]), check.name, check.found, check.advice) for check in results]
    print_table(("", "check", "found", "what to do"), rows)
    if any(check.status == "fail" for check in results):
        raise typer.Exit(1)


@app.command(name="config")
def show_config(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print all settings in force as YAML, with what each one means. What it prints is a valid --config file.

    Example: `slipstream config --set target.policy.max_nodes=8 > slipstream.yaml`
    """
    print(config_yaml(load(config, tuple(overrides or ())), DETECTED_SETTINGS), end="")


@app.command()
def tune(
    target: Annotated[str, typer.Option(metavar="NAME", help="A name or a folder; else `model.path`.")] = "",
    head: Annotated[str, typer.Option(metavar="NAME", help="Its draft head or model; else `draft.model`, or "
                                "the shipped head.")] = "",
    drafter: Annotated[str, typer.Option(
        metavar="KIND", help="eagle3, eagle2, block, mtp or standalone; else `draft.drafter`, or eagle3.")] = "",
    prompts: Annotated[Path | None, path(
        "FILE", "JSONL with `turns` or `prompt` in each line; else six built-in questions.")] = None,
    out: Annotated[Path, path("FILE", "Where to write the best setting.")] = Path("tuned.yaml"),
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers; 0: greedy.")] = 0.0,
    steps: Annotated[str, typer.Option(metavar="LIST", help="Depths to try.")] = "1,2,3,4,5,6,8",
    topk: Annotated[str, typer.Option(metavar="LIST", help="Children of a node to try; 1 is a chain.")] = "1,2,4",
    nodes: Annotated[str, typer.Option(
        metavar="LIST", help="Nodes of a tree to try; a chain has as many as steps.")] = "8,16,32",
    exchange_ms: Annotated[float, typer.Option(
        min=0.0, help="Time of a round between the services: about 1 on one machine; more over a network.")] = 1.0,
    apart: Annotated[bool, typer.Option(
        "--apart", help="Also compare with a draft on its own device.")] = False,
    link: Annotated[str, typer.Option(
        metavar="HOST:PORT", help="A running draft: the round trip to it is measured, instead of --exchange-ms.")] = "",
    draft_ms: Annotated[float, typer.Option(
        min=0.0, help="Time of a tree on the draft's own device, as `tune` prints there; 0: same as here.")] = 0.0,
    config: ConfigFile = None, overrides: Overrides = None,
) -> None:
    """Find the tree shape that pays for a target and its draft on this device, and write it as a configuration.

    A deeper or wider tree gets more tokens accepted, and costs more to draft and to verify. Every shape drafts and
    verifies the same prompts here, in one process. The result is **acceptance length / (draft + verify + exchange)**,
    in tokens a second. Takes minutes; do nothing else on the machine meanwhile.

    Examples:

    `slipstream tune --head my-head --steps 3,5 --topk 1,4 --nodes 8,16 --out my.yaml`, then
    `slipstream run --config my.yaml`

    `slipstream tune --drafter standalone --target big-model --head small-model --prompts questions.jsonl`

    `slipstream tune --head my-head --apart --link draft.example:50052`
    """
    from slipstream.cli.tuning import RemoteDraft, run, with_pair

    settings = with_pair(load(config, tuple(overrides or ())), target, head, drafter)
    run(settings, {"--steps": steps, "--topk": topk, "--nodes": nodes}, prompts, tokens, temperature,
        RemoteDraft(exchange_ms / 1e3, link, draft_ms / 1e3), apart, out, Console())

Target = Annotated[str, typer.Option(metavar="NAME", help="The model to draft for: a name or a folder.")]
Minutes = Annotated[float, typer.Option(min=0, help="For all runs together: about 60 % generating, 35 % training. 0: "
                                                    "limited only by --tokens and --steps.")]
Out = Annotated[Path | None, path("FOLDER", "Where the head goes; else TARGET-KIND-trained here.")]
Work = Annotated[Path | None, path(
    "FOLDER", "For intermediate files, from which a later run goes on; else in the user's cache folder.")]
Prompts = Annotated[Path | None, path(
    "FILE", "JSONL with `turns` or `prompt` in each line, to answer; else the target asks itself.")]
Data = Annotated[list[Path] | None, path(
    "FOLDER", "Conversations of this target from another --work, to train on too; may be repeated.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens of conversations to make, given text included, in all runs; "
                                     "0: as time allows.")]
Steps = Annotated[int, typer.Option(min=0, help="Training steps, in all runs; 0: as time allows.")]
Generate = Annotated[bool, typer.Option(help="Generate conversations first.")]
Train = Annotated[bool, typer.Option(help="Train a head on the conversations.")]
Batch = Annotated[int, typer.Option(min=0, help="Conversations at a time; 0: 64 on a CPU, 512 on a GPU.")]
MaxPrompt = Annotated[int, typer.Option(min=1, help="Tokens; longer given prompts are left out.")]
MaxAnswer = Annotated[int, typer.Option(min=1, help="Tokens; longer answers are cut.")]
DraftVocab = Annotated[int, typer.Option(min=16, help="How many tokens the head can draft: the most frequent ones.")]
Unroll = Annotated[int, typer.Option(help="Steps that the head is trained to draft from its own states.")]
LearningRate = Annotated[float, typer.Option(min=1e-9, help="The peak learning rate.")]
Questions = Annotated[bool, typer.Option(help="Also train on questions that the target made, not only on its answers.")]
Kind = Annotated[Dtype, typer.Option("--dtype", help="Of the target while it generates, and of the saved head.")]
Device = Annotated[str, typer.Option(help="`cpu` or `cuda`; else cuda where there is one.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: all. As many processes talk and train, up to four.")]
SaveEvery = Annotated[float, typer.Option(
    metavar="SECONDS", min=0.0, help="What a kill may lose, at most, besides conversations that are not finished.")]
Begin = Annotated[str, typer.Option(
    metavar="HEAD", help="A head to begin with, such as one for the target before it was tuned; else its last layers.")]
Mean = Annotated[bool, typer.Option(
    "--mean", help="Save the mean of the weights of `--begin` and of those learnt, which may be better than both.")]
HeadKind = Annotated[Literal["eagle3", "dspark"], typer.Option("--kind", help="Of head: `dspark` drafts blocks.")]
RowsPerStep = Annotated[int, typer.Option(
    min=1, help="Tokens of one training step: more cost less time each, as a step also takes a fixed time.")]
Layers = Annotated[int, typer.Option(min=1, max=4, help="Of an EAGLE-3 head: more draft better, and slower.")]
Seed = Annotated[int, typer.Option(help="The same seed plans the same conversations.")]


@app.command(name="train-head")
def train_head(
    target: Target = "smollm2-135m", minutes: Minutes = 10.0, out: Out = None, work: Work = None,
    prompts: Prompts = None, data: Data = None, tokens: Tokens = 0, steps: Steps = 0, generate: Generate = True,
    train: Train = True, batch: Batch = 0, max_prompt: MaxPrompt = 1024, max_answer: MaxAnswer = 256,
    draft_vocab: DraftVocab = 8192, unroll: Unroll = 3, learning_rate: LearningRate = 1.5e-3,
    questions: Questions = True, dtype: Kind = "bfloat16", device: Device = "", threads: Threads = 0,
    save_every: SaveEvery = 60.0, seed: Seed = 0, kind: HeadKind = "eagle3", begin: Begin = "", layers: Layers = 1,
    rows_per_step: RowsPerStep = 2048, mean: Mean = False,
) -> None:
    """Train a draft head for a model, from nothing but the model.

    The target generates conversations (or answers given prompts), and its states are kept. A small head learns from
    them to predict the target's next tokens. Then it drafts for held-out conversations, and its acceptance is written
    into its folder. The same command again goes on where it stopped, with more `--minutes` or after a kill. More
    conversations help more than more training: hours pay.

    Examples:

    `slipstream train-head --minutes 10`

    `slipstream train-head --target path/to/model --minutes 120 --prompts prompts.jsonl --out my-head`

    `slipstream train-head --kind dspark --no-generate --minutes 180`

    `slipstream train-head --target my-tuned-model --begin my-head --minutes 60 --out my-tuned-head`

    `slipstream train-head --no-train --minutes 60 --work talk`, then
    `slipstream train-head --no-generate --data talk --minutes 30`
    """
    from slipstream.cli.training import run
    from slipstream.models.folder import resolve
    from slipstream.train.generate import Limits
    from slipstream.train.recipe import Recipe

    limits = Limits(max_prompt=max_prompt, max_answer=max_answer)
    recipe = Recipe(minutes, tokens, steps, generate, train, prompts, batch, limits, draft_vocab, unroll,
                    learning_rate, rows_per_step, learn_questions=questions, dtype=dtype, device=device,
                    save_every_s=save_every, seed=seed, kind=kind, begin=resolve(begin) if begin else None,
                    layers=layers, mean=mean)
    run(target, out, work, tuple(data or ()), recipe, threads, Console())


@app.command()
def simulate(
    schedule: Annotated[str, typer.Option(help="plain, colocated, serial, run-ahead or outcomes (far ahead); all: one "
                                          "row each.")] = "all",
    targets: Annotated[int, typer.Option(min=1, help="Targets, each on a device of its own.")] = 1,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts, which the targets share.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Streams of each target.")] = 1,
    rtt_ms: Annotated[float, typer.Option(min=0.0, max=MAX_MS, help="Round trip between target and draft.")] = 1.0,
    step_ms: Annotated[float, typer.Option(min=0.01, max=MAX_MS, help="A target step of few rows.")] = 20.0,
    draft_ms: Annotated[float, typer.Option(min=0.01, max=MAX_MS, help="A whole tree of one batch.")] = 5.0,
    acceptance: Annotated[str, typer.Option(help="Chance that a node's first, second, ... child is right.")] =
    "0.75,0.12,0.05",
    seconds: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Simulated time.")] = 30.0,
) -> None:
    """Predict what a deployment would do: the real scheduler, policy and protocol in simulated time.

    Example: `slipstream simulate --rtt-ms 5 --batch 8 --step-ms 25 --draft-ms 4`
    """
    from rich.progress import Progress

    from slipstream.base.config import LogSection
    from slipstream.observe.log import configure
    from slipstream.simulate.simulation import SCHEDULES, describe

    configure(LogSection(level="error"))
    names, rows = SCHEDULES if schedule == "all" else (schedule,), list[dict[str, str]]()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(names))
        for name in names:
            rows.append(describe(name, targets, drafts, batch, rtt_ms, step_ms, draft_ms, acceptance, seconds,
                                 lambda share: bar.update(task, completed=len(rows) + share)))
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])


@models_app.command(name="list")
def list_known() -> None:
    """List the models that are known by name, and which of them are prepared.

    Example: `slipstream models list`
    """
    from slipstream.models.folder import list_models

    rows = [(model.name, "prepared" if model.prepared else "packaged" if model.packaged else "not installed",
             model.description, str(model.folder)) for model in list_models()]
    print_table(("name", "state", "what", "folder"), rows)


@models_app.command(name="prepare")
def prepare_known(
    name: Annotated[str, typer.Argument(
        help="A name that `slipstream models list` shows; with --dtype also a folder.")],
    folder: Annotated[Path | None, path(
        "FOLDER", "Else the user's cache folder; for a folder with --dtype, beside it.", "--to")] = None,
    dtype: Annotated[str, typer.Option(
        "--dtype", metavar="KIND", help="int8, bfloat16 or float32: a further folder with weights of that kind.")] = "",
) -> None:
    """Turn a packaged model into a folder that services load. A second call does nothing.

    Examples:

    `slipstream models prepare smollm2-135m`

    `slipstream models prepare smollm2-135m --dtype int8`, then `slipstream run --set model.path=FOLDER` with what it
    prints
    """
    from slipstream.models.folder import KNOWN, prepare, resolve

    destination = Path(abspath(folder)) if folder is not None else None  # "." has no parent folder
    if not dtype:
        print(prepare(name, destination))
        return
    from slipstream.engine.preparation import prepare_as

    source = prepare(name) if name in KNOWN else Path(abspath(resolve(name)))  # "." has no name to write beside
    print(prepare_as(dtype, source, destination or source.with_name(f"{source.name}-{dtype}")))


def main() -> None:
    """The console script. Errors of Slipstream and of the system (a full disk) print one sentence and exit with 1."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that a terminal lacks are escaped, no error
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here: an error while Python exits would print no sentence
    except (SlipstreamError, OSError) as error:
        print_error(error)
        with suppress(OSError, AttributeError, ValueError):  # what is left cannot be written; Python would try
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _settings(config: Path | None, overrides: list[str] | None) -> Config:
    return resolve_drafter(load(config, tuple(overrides or ())))


def _run_in_foreground(module: str, config: Config) -> None:
    """Run the ``serve`` of ``module`` in this process until a signal drains it."""
    from importlib import import_module

    from slipstream.cli import process

    process.prepare_libraries(config)
    process.run(config, import_module(module).serve)
