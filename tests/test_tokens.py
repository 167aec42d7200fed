"""Text and tokens, against the tokenizers library's own decoding and transformers' chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from router_service.text.files import literal_tokens
from router_service.text.template import MAX_RENDERED
from router_service.text.tokens import ChatTemplate, Detokenizer, TextCodec, Turn
from slipstream.base.errors import InvalidRequest, ModelError
from tests.echo import EchoTarget
from tests.routing import CHAT, COMPLETIONS, HELLO, events, routing
from tests.tiny import write_tiny_model

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>"]
SPACE = "\u2581"
TEXT = "the naïve café – 字典 🙂🙃 then the end, and then the caféteria " * 4
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'].strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """A trained byte-level BPE with special tokens and added ones that are not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=340, show_progress=False, special_tokens=SPECIALS,
                                                     initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken("<思>", normalized=False), AddedToken("<think>", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: SentencePiece's spaces, bytes as <0xNN>, and no space at the start of a text."""
    words = [f"{SPACE}the", f"{SPACE}", "e", "nd", "字", f"{SPACE}{SPACE}x"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


byte_level_oracle = byte_level()
byte_fallback_oracle = byte_fallback()


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("codec") / "bytes", byte_level())


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_folder(tmp_path_factory.mktemp("codec") / "fallback", byte_fallback()))


def incremental(codec: TextCodec, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_pieces_join_to_the_decoded_tokens(codec: TextCodec, data: st.DataObject) -> None:
    # Any ids at all: halves of characters, special and unknown tokens.
    tokens = data.draw(st.lists(st.integers(0, codec.vocab_size + 3), max_size=40))
    wanted = byte_level_oracle.decode(tokens, skip_special_tokens=True)
    assert "".join(incremental(codec, tokens)) == wanted


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_no_piece_holds_half_a_character(codec: TextCodec, text: str) -> None:
    tokens = codec.encode(text.replace("<", "("))
    pieces = incremental(codec, tokens)
    assert "".join(pieces) == text.replace("<", "(")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert pieces[-1] == ""


@settings(deadline=None)
@given(words=st.lists(st.sampled_from([" the", " ", "e", "nd", "字", "  x", "é", "🙂", "<s>"]), max_size=20))
def test_byte_fallback_joins_to_the_decoded_tokens(fallback: TextCodec, words: list[str]) -> None:
    tokens = byte_fallback_oracle.encode("".join(words)).ids
    assert "".join(incremental(fallback, tokens)) == byte_fallback_oracle.decode(tokens, skip_special_tokens=True)


def test_first_space_is_dropped_once_where_the_decoder_does(fallback: TextCodec) -> None:
    the = id_of(byte_fallback_oracle, f"{SPACE}the")
    assert incremental(fallback, [2, the, the]) == ["", "the", " the", ""]


def test_unfinished_character_comes_at_the_end(codec: TextCodec) -> None:
    tokens = [id_of(byte_level_oracle, letter) for letter in "ðŁĻ"]  # three of the four bytes of an emoji
    assert incremental(codec, tokens) == ["", "", "", "\ufffd"]


def test_token_bytes_and_texts(codec: TextCodec) -> None:
    assert codec.token_bytes(codec.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert codec.token_text(id_of(byte_level_oracle, "ð")) == "\ufffd"
    assert codec.token_bytes(id_of(byte_level_oracle, "<思>")) == "<思>".encode()
    assert codec.token_bytes(codec.vocab_size) == codec.token_bytes(-1) == b""
    text = "naïve 字🙂"
    assert b"".join(map(codec.token_bytes, codec.encode(text))) == text.encode()


def test_raw_prompts_keep_special_tokens(codec: TextCodec) -> None:
    assert [token for token in codec.encode("a<|im_end|><|im_start|>b") if token in codec.specials] == [1, 0]


def test_lone_surrogate_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as raised:
        codec.encode("a\ud800")
    assert raised.value.field == "prompt"
    with pytest.raises(InvalidRequest) as raised:
        codec.chat([{"role": "user", "content": "a\ud800"}])
    assert raised.value.field == "messages"


def test_chat_gives_the_prompt_that_transformers_gives(folder: Path, codec: TextCodec) -> None:
    from transformers import AutoTokenizer

    oracle: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " the naïve 字 \n"},
                {"role": "assistant", "content": "<think>x"}, {"role": "user", "content": ""}]
    for prompt in (True, False):
        wanted = oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True)["input_ids"]
        assert codec.chat(messages, Turn(add_generation_prompt=prompt)) == wanted


def test_a_final_message_goes_on_as_transformers_lets_it(folder: Path, codec: TextCodec) -> None:
    from transformers import AutoTokenizer

    oracle: Any = AutoTokenizer.from_pretrained(folder)
    for last in ("Once upon a time", " two\n"):
        messages = [{"role": "user", "content": "a tale"}, {"role": "assistant", "content": last}]
        wanted = oracle.apply_chat_template(messages, continue_final_message=True, tokenize=True)["input_ids"]
        tokens = codec.chat(messages, Turn(add_generation_prompt=False, continue_final_message=True))
        assert tokens == wanted or byte_level_oracle.decode(tokens) == byte_level_oracle.decode(wanted) + last[-1]


def test_names_reach_the_template_as_text_and_replace_none_of_its_own() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ messages[0].content }}", {"bos_token": "<s>"}, ["<s>"])
    turn = Turn(variables={"mood": "<s>", "bos_token": "no"})
    assert template.render([{"role": "user", "content": "x"}], turn) == ["<s>", "<s>", "x"]
    silent = ChatTemplate("{{ messages | length }}", {}, [])
    with pytest.raises(InvalidRequest, match="does not write the final message") as caught:
        silent.render([{"role": "user", "content": "x"}], Turn(continue_final_message=True))
    assert caught.value.field == "messages"


def test_special_tokens_are_shown_where_they_are_wanted(codec: TextCodec) -> None:
    tokens = codec.encode("naïve <|im_end|>字")
    shown = Detokenizer(codec, codec.specials)
    assert "".join([*map(shown.push, tokens), shown.flush()]) == "naïve <|im_end|>字"


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|>", "\n", "system", "\ue000", "\ue0010"]),
                      max_size=12))
def test_special_tokens_in_messages_stay_text(codec: TextCodec, parts: list[str]) -> None:
    content = "".join(parts)
    tokens = codec.chat([{"role": "user", "content": content}])
    assert [token for token in tokens if token in codec.specials] == [0, 1, 0]
    text = byte_level_oracle.decode(tokens, skip_special_tokens=False)
    assert text == f"<|im_start|>user\n{content.strip()}<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_between_turns_stay_text_where_they_are_not_special(tmp_path: Path) -> None:
    """As DeepSeek R1's: a user could end his turn and write the assistant's, and what he says of <think> began the
    answer's reasoning."""
    template = ("{% for m in messages %}{{ '<｜User｜>' + m.content }}{% endfor %}{{ '<｜Assistant｜>' }}"
                "{{ '<think>' if thinking }}{# </think> <a|b> #}")
    tokenizer, words = byte_level(), ("<｜User｜>", "<｜Assistant｜>", "<a|b>", "<think>")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    user, assistant, other, think = (id_of(tokenizer, word) for word in words)
    codec = TextCodec(write_folder(tmp_path, tokenizer, chat_template=template))
    try:
        for thinking in (False, True):
            said = "What is <think>, <｜Assistant｜>, <a|b>?"
            tokens = codec.chat([{"role": "user", "content": said}], Turn(variables={"thinking": thinking}))
            assert [token for token in tokens if token in (user, assistant, other, think)] == [
                user, think, other, assistant, *([think] if thinking else [])]
            assert codec.text(tokens) == f"<｜User｜>{said}<｜Assistant｜>" + "<think>" * thinking
            assert codec.starts_in_reasoning(tokens) == thinking
    finally:
        codec.close()


def test_a_token_between_turns_as_text_has_no_space_within() -> None:
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    for text, tokens in literal_tokens(tokenizer, ["<|user|>", *SPECIALS]).items():
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text and id_of(tokenizer, text) not in tokens


def test_special_tokens_hidden_deep_stay_text() -> None:
    template = ChatTemplate("{{ messages[0].calls | tojson }}", {}, SPECIALS)
    parts = template.render([{"calls": [{"name": "f", "args": {"<s>": "1<|im_end|>", "n": 2}}]}])
    assert parts[1::2] == ["<s>", "<|im_end|>"]
    assert "".join(parts) == (
        '[{"name": "f", "args": {"<s>": "1<|im_end|>", "n": 2}}]')


@pytest.mark.parametrize("messages", [
    [{"role": "robot", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": 3}],
    [{"content": "x"}],
], ids=["refused", "no content", "number", "no role"])
def test_messages_that_do_not_fit_the_template(codec: TextCodec, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        codec.chat(messages)
    assert raised.value.field == "messages"


def test_template_environment_is_that_of_transformers() -> None:
    source = ("{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ bos_token }}"
              "{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
              "{% if tools is not none %}tools{% endif %}{{ unknown }}")
    rendered = ChatTemplate(source, {"bos_token": "<s>"}, SPECIALS).render([{"a": "é<"}, {"a": "b"}])
    assert rendered == ['<s>{"a": "é<"}4']


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
])
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(ModelError, match="sandbox"):
        ChatTemplate(source, {}, []).render([{"role": "user", "content": "x"}])


def test_rendered_text_is_capped() -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}" + "x" * 5000 + "{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match=str(MAX_RENDERED)):
        ChatTemplate(endless, {}, [])
    echo = ChatTemplate("{{ messages[0].content * 2 }}", {}, [])
    with pytest.raises(InvalidRequest, match=str(MAX_RENDERED)):
        echo.render([{"role": "user", "content": "x" * (MAX_RENDERED // 2 + 1)}])
    assert echo.render([{"role": "user", "content": "x"}]) == ["xx"]


def test_broken_template_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat_template"):
        TextCodec(write_folder(tmp_path, byte_level(), chat_template="{% for %}"))
    with pytest.raises(ModelError, match="chat_template"):
        TextCodec(write_folder(tmp_path, byte_level(), chat_template=5))


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    codec = TextCodec(write_folder(tmp_path, byte_level(), chat_template=named))
    assert codec.chat([]) == codec.encode("d")
    (tmp_path / "chat_template.jinja").write_text("j")
    assert TextCodec(tmp_path).chat([]) == codec.encode("j")
    without = TextCodec(write_folder(tmp_path / "base", byte_level(), chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        without.chat([{"role": "user", "content": "x"}])
    (tmp_path / "base" / "chat_template.json").write_text('{"chat_template": "p"}')  # LLaVA's, of its processor
    assert TextCodec(tmp_path / "base").chat([]) == codec.encode("p")


def test_stop_tokens_come_from_the_nearest_file_and_the_tokenizer(tmp_path: Path) -> None:
    """Of base models that were taught to chat often only the tokenizer says what ends a turn: answers went on with the
    user's next."""
    folder = write_folder(tmp_path, byte_level())
    assert TextCodec(folder).stop_token_ids == (1,)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert TextCodec(folder).stop_token_ids == (2, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0, 1]}')
    assert TextCodec(folder).stop_token_ids == (1, 0)
    # As chats that were trained behind a base model are published: files of the model are still that one's.
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert TextCodec(folder).stop_token_ids == (0, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        TextCodec(folder)


async def test_tokens_are_chosen_as_the_model_says_where_a_request_says_nothing(tiny_folder: Path,
                                                                               tmp_path: Path) -> None:
    """As in vLLM and SGLang."""
    folder, target = tmp_path / "cool", EchoTarget()
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None}))
    async with routing(folder, target) as r:
        for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})):
            found = []
            for said in ({}, {"temperature": 0, "top_k": -1, "repetition_penalty": 1.1}):
                assert (await r.post(path, **prompt, **said)).status_code == 200
                sampling = target.requests[-1].sampling
                found.append((sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty))
            assert found == [(0.6, 20, 0.95, 1.0), (0.0, 0, 0.95, 1.1)]


@pytest.mark.parametrize(("name", "match"), [
    ("tokenizer.model", r"makes it of tokenizer\.model, .*AutoTokenizer.*save_pretrained"),
    ("tekken.json", r"tekken\.json is not read: take tokenizer\.json"), ("merges.txt", "its fast tokenizer$")])
def test_a_folder_without_a_fast_tokenizer_says_where_one_comes_from(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=match):
        TextCodec(tmp_path)


def test_a_default_that_none_can_mean_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    for said in ('{"temperature": "cool"}', '{"top_p": 7}'):
        (folder / "generation_config.json").write_text(said)
        with pytest.raises(ModelError, match=r"generation_config\.json: t(emperature|op_p): "):
            TextCodec(folder)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder: WordPiece"):
        TextCodec(write_folder(tmp_path, tokenizer))


async def test_an_answer_that_goes_on_from_a_text_keeps_the_space_between(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are SentencePiece's: joined to what it continues, an answer is not to grow together with it."""
    monkeypatch.setattr("tests.echo.VOCAB", 300)
    target = EchoTarget()
    target.says = "".join(chr(byte + 3) for byte in b" the")  # tokens of bytes
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    async with routing(write_folder(write_tiny_model(tmp_path / "target"), byte_fallback()), target) as r:
        async def said(path: str, **body: Any) -> str:
            streamed = events((await r.post(path, max_tokens=4, stream=True, **body)).text)
            choice = (await r.post(path, max_tokens=4, **body)).json()["choices"][0]
            whole = str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
            parts = [chunk["choices"][0].get("text") or chunk["choices"][0].get("delta", {}).get("content") or ""
                     for chunk in streamed]
            assert "".join(parts) == whole
            return whole

        assert await said(COMPLETIONS, prompt="the") == " the"
        assert await said(COMPLETIONS, prompt="the", echo=True) == "the the"
        assert await said(COMPLETIONS, prompt="<s>") == "the", "nothing stands before it"
        assert await said(CHAT, messages=HELLO) == "the"
        assert await said(CHAT, messages=begun, continue_final_message=True, add_generation_prompt=False) == " the"
        message = (await r.post("/v1/messages", messages=begun, max_tokens=4)).json()
        assert message["content"] == [{"type": "text", "text": " the"}]
