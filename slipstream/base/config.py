"""The configuration: one tree of frozen sections, one YAML file, which is also the chart's values and its ConfigMap.

Rules:
1. Every knob has a default, chosen by a benchmark or a stated reason; there are few of them.
2. A mistake is a line that names its key and what to write instead; of an unknown key, the nearest known one.
3. Nothing is read from the environment. What is detected (threads, slots) is returned and logged, never written back.
4. It prints itself, with what each setting means; what is printed can be loaded.

It knows nothing about how a value is used.
"""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from slipstream.base.address import dialled, listening
from slipstream.base.errors import ConfigError

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "native", "torch"]
Quantize = Literal["none", "fp8", "int8"]
Listen = Annotated[str, BeforeValidator(listening)]  # host:port
File = Annotated[str, AfterValidator(os.path.expanduser)]  # a file or folder; "" is none
Peers = Annotated[tuple[str, ...], BeforeValidator(dialled)]  # host:port or kubernetes:///SERVICE.NAMESPACE:PORT


def _engine(given: Any) -> Any:
    is_vllm_section = isinstance(given, Mapping) and list(given) == ["vllm"] and isinstance(given["vllm"], Mapping)
    if not is_vllm_section and given not in ("ours", "vllm"):
        raise ValueError(f"'{str(given)[:MAX_SHOWN_CHARS]}' is not known; write ours, vllm, or "
                         "{vllm: {max_num_seqs: 32}} with arguments of vLLM's")
    return given


Engine = Annotated[Literal["ours", "vllm"] | dict[Literal["vllm"], dict[str, Any]], BeforeValidator(_engine)]

# Pydantic's names of mistakes, or their first words -> our messages; {input} and pydantic's own context are filled in.
MESSAGES: Mapping[str, str] = MappingProxyType({
    "model_type": "is a section: write its settings below it, one a line, or --set {key}.NAME=VALUE",
    "string_type": "{input} is not text; YAML takes it as such in quotes: '{input}'",
    "int": "'{input}' is not a whole number",
    "float": "'{input}' is not a number",
    "finite_number": "must have an end",
    "bool": "'{input}' is neither true nor false",
    "tuple_type": "write a list, as in [one, two]; [] for none",
    "too_short": "is empty; write one at least, as in [127.0.0.1:8051]",
    "literal_error": "'{input}' is not known; write {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "string_pattern_mismatch": "'{input}' is no such address; write http://HOST:PORT, or https://",
})
DETECTED_SETTINGS = ("drafts", "shared_cores", "targets")  # detected by services on one machine unless they are set
MAX_SHOWN_CHARS = 80  # of a wrong value
BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]+\]:[0-9]+")  # an address of IPv6, with which YAML begins a list


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, given: Any) -> Any:
        """A section in a file of which all settings are commented out."""
        return {} if given is None else given

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, given: Any, info: ValidationInfo) -> Any:
        """Python's true is the number 1, but who writes ``run_ahead: true`` wants more than one node."""
        if isinstance(given, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError(f"'{str(given).lower()}' is not a number")
        return given


class ModelSection(Section):
    path: str = Field("smollm2-135m", description="name of a known model, or a folder with config.json and safetensors")
    dtype: Dtype = Field("bfloat16", description="float32: exact on a CPU; bfloat16: for serving")
    device: str = "cpu"
    engine: Literal["decoder", "hf"] = Field("decoder", description="hf: any transformers causal LM, slower")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores (a draft: half of them, or "
                         "all while an EAGLE head has a single session)")
    kernels: Kernels = Field("auto", description="auto: our kernels for bfloat16 on a CPU with a C++ compiler, and "
                             "on a GPU with Triton, if they pass a test at start, else torch's; native: our CPU "
                             "kernels, or an error if the test shows that drafts change a bit; torch: only torch's, in "
                             "drafts too")
    quantize: Quantize = Field("none", description="int8: for our kernels on a CPU; fp8: for GPUs (Hopper or newer); "
                               "both may change answers")
    tensor_parallel: int = Field(1, ge=1, le=16, description="GPUs that share each layer of a target's model; its "
                                 "heads and intermediate_size must be divisible by it")


class GrowthSection(Section):
    """The shape of a model drafter's tree. `slipstream tune` finds the best one for a device."""

    num_steps: int = Field(3, ge=1, le=16, description="depth of the tree")
    topk: int = Field(4, ge=1, le=16, description="children of a node; 1 is a chain")
    num_draft_tokens: int = Field(8, ge=1, le=63, description="nodes sent to the target, without the root")


class DraftSection(Section):
    listen: Listen = "127.0.0.1:8052"
    metrics_listen: Listen = "127.0.0.1:9102"
    drafter: Literal["auto", "ngram", "standalone", "eagle2", "eagle3", "mtp", "block"] = Field(
        "auto", description="auto: the head that is shipped for this model, else ngram")
    model: str = Field("", description="draft model or head: a name or a folder; not for ngram; empty for an MTP "
                       "head inside the target's own folder")
    token_map: File = Field("", description="a file with the token ids to draft from (FR-Spec); not for eagle3, "
                           "block, ngram")
    compile: bool = Field(False, description="torch.compile for the draft model or head; needs a C++ compiler")
    quantize: Literal["auto", "none", "fp8", "int8"] = Field(
        "auto", description="of the draft model or head, as in model, int8 not for eagle2, mtp, block; auto: int8 for "
                            "an EAGLE-3 head on our CPU kernels, else none; may cost acceptance, changes no answer")
    dtype: Dtype = "bfloat16"
    device: str = "cpu"
    max_sessions: int = Field(256, ge=1)
    run_ahead: int = Field(0, ge=0, le=1023, description="nodes grown while the target verifies, beyond "
                                                       "those that it asked for; 0: none")
    growth: GrowthSection = GrowthSection()


class PolicySection(Section):
    """When speculation pays, and when it stops."""

    max_nodes: int = Field(16, ge=0, le=63, description="draft tokens (nodes) of one session in one step; "
                           "0: plain decoding")
    always: bool = Field(False, description="draft and verify whole trees even if it does not pay: to measure "
                         "drafters, and for tests")
    deadline_max_s: float = Field(0.25, gt=0, description="a step never waits longer for a drafter")


class TargetSection(Section):
    listen: Listen = "127.0.0.1:8051"
    metrics_listen: Listen = "127.0.0.1:9101"
    engine: Engine = Field("ours", description="vllm: vLLM's, if it and slipstream-vllm are installed; with "
                           "arguments for it: {vllm: {gpu_memory_utilization: 0.8}}")
    drafts: Peers = Field(("127.0.0.1:8052",),
                                    description="host:port, or kubernetes:///SERVICE.NAMESPACE:PORT; []: no drafts")
    max_sessions: int = Field(64, ge=1, description="answers decoded at the same time")
    slots: int = Field(0, ge=0, description="KV slots; 0: sized from max_sessions and memory")
    max_context: int = Field(0, ge=0, description="longest prompt plus answer; 0: the model's own limit")
    shared_cores: bool = Field(False, description="drafts run on this target's CPU cores, so it asks for no "
                               "tree that is not worth waiting for; `slipstream run` sets it on a CPU")
    prompt_lookup: bool = Field(True, description="verify tokens that followed the newest ones earlier in the "
                                "same text, or that a grammar forces, where that is faster than plain steps and a "
                                "drafter's trees")
    drain_s: float = Field(45.0, ge=0, description="time for running answers to finish when the service is told to "
                           "stop; then another target goes on with them or, if none can, this one")
    accept_threshold_single: float = Field(1.0, gt=0, le=1, description="LOSSY below 1: sampled answers accept draft "
                                           "tokens whose probability is at least this")
    accept_threshold_acc: float = Field(1.0, gt=0, le=1, description="LOSSY below 1: a sampled answer takes draft "
                                        "tokens 1 / this times as often as their probability says")
    policy: PolicySection = PolicySection()

    @property
    def vllm(self) -> Mapping[str, Any] | None:
        """Arguments of vLLM's engine; None: the engine is ours."""
        if isinstance(self.engine, str):
            return {} if self.engine == "vllm" else None
        return self.engine["vllm"]


class RouterSection(Section):
    listen: Listen = "127.0.0.1:8000"
    grpc_listen: Listen = "127.0.0.1:8001"
    metrics_listen: Listen = "127.0.0.1:9100"
    targets: Peers = Field(("127.0.0.1:8051",), min_length=1,
                           description="host:port, or kubernetes:///SERVICE.NAMESPACE:PORT")
    model_name: str = Field("", description="the name clients use; empty: the target's own")
    api_keys_file: File = Field("", description="one key a line, then its tenant, as in name=alice; read again when "
                                "it changes; empty: no keys")
    max_in_flight: int = Field(128, ge=1, description="answers that run at the same time; twice as many may wait")
    max_wait_s: float = Field(30.0, gt=0, description="a request that would wait longer for its turn is refused at "
                              "once, with 429 and a time to retry")
    request_timeout_s: float = Field(600.0, gt=0, description="an answer that takes longer ends with an error")
    drain_s: float = Field(45.0, ge=0, description="time for running answers to finish when the service is told to "
                           "stop")
    strict: bool = Field(False, description="refuse unknown fields, instead of naming them in a header")


class TlsSection(Section):
    """Mutual TLS between the services. A server's certificate has the dialled name; behind a kubernetes:/// address,
    SERVICE.NAMESPACE.svc."""

    folder: File = Field("", description="has three PEM files: tls.crt and tls.key, this service's certificate as "
                              "server and client, and ca.crt, the authority of the others' certificates; "
                              "empty: plain text")
    allowed_names: tuple[str, ...] = Field((), description="a client's certificate must have one of these names (DNS, "
                                                           "URI); empty: any that the authority signed")

    @model_validator(mode="after")
    def _whole(self) -> TlsSection:
        if self.allowed_names and not self.folder:
            raise ValueError("allowed_names need a folder with certificates")
        return self


class WireSection(Section):
    insecure_allow_plaintext: bool = Field(False, description="listen beyond loopback without TLS")
    kubeconfig: str = Field("", description="finds the API server for kubernetes:/// addresses; empty: the cluster "
                                            "that this pod runs in")
    tls: TlsSection = TlsSection()


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    trace: File = Field("", description="file for a trace of rounds (Chrome's format), written at the end; empty: none")
    spans: str = Field("", pattern=r"^(https?://\S+)?$", description="an OpenTelemetry collector (OTLP over gRPC) that "
                       "gets spans of requests, as in http://collector:4317; empty: none")


class Config(Section):
    model: ModelSection = ModelSection()
    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    router: RouterSection = RouterSection()
    wire: WireSection = WireSection()
    log: LogSection = LogSection()

    def on_one_machine(self) -> Config:
        """For services beside each other: on a CPU they share its cores, unless something else was said."""
        if "shared_cores" in self.target.model_fields_set:
            return self
        shared = self.model.device == self.draft.device == "cpu"
        return self.model_copy(update={"target": self.target.model_copy(update={"shared_cores": shared})})


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which no key is repeated in a section: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value} stands there twice; write what belongs "
                                  "to it once, in one place")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _QuotingDumper(yaml.SafeDumper):
    """Quotes a text that ``_UniqueKeyLoader`` would take for a number, such as a folder 1e-5."""


# YAML 1.1 has a point in every such number; Helm writes 0.00005 as 5e-05.
for _kind in (_UniqueKeyLoader, _QuotingDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"),
                                list("-+0123456789"))


def load(path: str | Path | None = None, overrides: tuple[str, ...] = ()) -> Config:
    """The configuration of a YAML file (None: all defaults) with ``section.key=value`` overrides on top.

    Raises ConfigError naming the key, and the nearest known key where one was mistyped.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = _UniqueKeyLoader(Path(path).read_text(encoding="utf-8")).get_single_data() or {}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected sections like 'target:', found {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe_mistake(problem) for problem in error.errors())) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        below = tree.get(section)
        if below is None:
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override}: {section} is a value, not a section")
        tree = below
    if BRACKETED.fullmatch(value):
        tree[last] = value
        return
    try:
        tree[last] = _UniqueKeyLoader(value).get_single_data() if value else ""
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--set {override}: not a YAML value") from error
    except ConfigError as error:
        raise ConfigError(f"--set {override}: {error}") from error


def _describe_mistake(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        known = _keys_at([str(part) for part in problem["loc"][:-1]])
        similar = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.54)
        return f"{key}: unknown key; " + (f"did you mean '{similar[0]}'?" if similar else f"known: {', '.join(known)}")
    message = MESSAGES.get(problem["type"]) or MESSAGES.get(problem["type"].partition("_")[0])
    if problem["input"] is None and problem["type"] == "string_type":
        return f"{key}: stands there without a value; write '' for none, or leave it out"
    if message is None:
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
    found = "nothing" if problem["input"] is None else str(problem["input"])[:MAX_SHOWN_CHARS]
    return f"{key}: {message.format(key=key, input=found, **problem.get('ctx', {}))}"


def _keys_at(sections: list[str]) -> list[str]:
    section: BaseModel = Config()
    for name in sections:
        section = getattr(section, name)
    return list(type(section).model_fields)


def config_yaml(section: BaseModel, hidden: Collection[str] = ()) -> str:
    """A whole configuration (or other sections, such as the chart's values) as YAML, with what each setting means as a
    comment. A configuration within others is left empty: it has a page of its own. ``hidden``: names of settings that
    are comments themselves unless they were set."""
    return "\n".join(_section(section, 0, hidden)) + "\n"


def _section(section: BaseModel, depth: int, hidden: Collection[str]) -> Iterable[str]:
    indent = "  " * depth
    for number, (name, field) in enumerate(type(section).model_fields.items()):
        value = getattr(section, name)
        inner = isinstance(value, BaseModel) and not isinstance(value, Config)
        if depth == 0 and number and isinstance(value, BaseModel):
            yield ""
        comment = _comment(field)
        if inner and not comment:
            comment = " ".join((type(value).__doc__ or "").split()).replace("``", "`")
        mark = "# " if name in hidden and name not in section.model_fields_set else ""
        yield f"{indent}{mark}{name}:" + ("" if inner else f" {_scalar(value)}") + (f"  # {comment}" if comment else "")
        if inner:
            yield from _section(value, depth + 1, hidden)


def _comment(field: FieldInfo) -> str:
    parts = [field.description or ""]
    if get_origin(field.annotation) is Literal:
        parts.append("one of " + ", ".join(str(choice) for choice in get_args(field.annotation)))
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt")
              if hasattr(rule, name)}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if any(bound != 0 for bound in bounds.values()):
        parts.append(", ".join(f"{words[name]} {bound}" for name, bound in bounds.items()))
    return "; ".join(part for part in parts if part)


def dump_yaml(value: Any, **layout: Any) -> str:
    """``value`` as YAML from which ``load`` reads the same."""
    text: str = yaml.dump(value, Dumper=_QuotingDumper, sort_keys=False, **layout)
    return text


def _scalar(value: Any) -> str:
    """Sections in a list, and one that is left empty, as users write them: what differs from the defaults."""
    if isinstance(value, list | tuple):
        value = [_non_default(item) for item in value]
    text = dump_yaml(_non_default(value), default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _non_default(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else value
