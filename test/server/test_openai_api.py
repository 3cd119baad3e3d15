"""An int2 server with fitted rotations, asked as clients ask: the ``openai`` package and plain HTTP.

The reference model recalls facts that lie in the quantized part of the cache, so a right answer shows that what was
stored came back.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from openai import BadRequestError, NotFoundError, OpenAI
from safetensors.torch import load_file, save_file

from support.api import loads, retracted, wait_for
from support.compare import LOGPROBS, assert_same, first_difference
from support.reference import DIGITS, MODEL, chat_question, document, fit_rotations, question, token_ids
from support.servers import STRICT, Server, serve

pytestmark = pytest.mark.server

PUBLIC_ARGS = ["--tensor-parallel-size", "1", "--kv-cache-dtype", "int2", "--trust-remote-code"]
PUBLIC_ARGS += ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "triton"]
"""Flags of the public OSCAR release, whose command line must start this server as it is."""
PUBLIC_ENV = {
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
    "SGLANG_OSCAR_K_CLIP_RATIO": "0.96",
    "SGLANG_OSCAR_V_CLIP_RATIO": "0.92",
    "SGLANG_OSCAR_ABSORB_V_ROTATION": "1",
    "SGLANG_MIXED_KV_PREFIX_TOKENS": "64",
    "SGLANG_MIXED_KV_RECENT_TOKENS": "256",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": "8",
    "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
}
"""Its variables; scales stay bfloat16, which costs less and is what the facts below were chosen with."""
ARGS = [*PUBLIC_ARGS, "--kv-cache-quant-group-size", "64", "--enable-cache-report"]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
NAME = str(MODEL)
RECENT = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Retraction is forced whenever two requests run; memory is checked after every step."""
    folder = tmp_path_factory.mktemp("reference")
    env = fit_rotations(folder) | PUBLIC_ENV | STRICT | RETRACT
    with serve(MODEL, folder / "server.log", *ARGS, env=env, warm_up=True) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    """A client; at the end of every test the server is alive, idle and has lost no memory."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1500, max_retries=0) as made:
        yield made
    server.flush()  # refused while anything runs
    assert server.alive()
    assert "leak" not in server.text()
    assert "Traceback" not in server.text()
    assert loads(server) == (0, 0)


def test_chat_recalls_facts(client: OpenAI) -> None:
    """Every answer has its form; the published recipe may cost the digits of some, as each processor rounds."""
    right = 0
    for text in (document(1200, seed) for seed in (1, 11, 12)):
        for word, number in text.facts.items():
            reply = client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": text.text + chat_question(word)}],
                max_tokens=32,
                temperature=0,
            )
            said = re.fullmatch(
                rf"The magic number for {word} is (\d{{{DIGITS}}})\.", reply.choices[0].message.content or ""
            )
            assert said
            right += said[1] == number
            assert reply.choices[0].finish_reason == "stop"
            assert reply.usage is not None
            assert reply.usage.prompt_tokens > 1100
    assert right >= 8, "the model should recall most facts from the quantized cache"


def test_completion_with_logprobs(client: OpenAI) -> None:
    text = document(900, seed=2)
    reply = client.completions.create(
        model=NAME, prompt=text.text + question(next(iter(text.facts))), max_tokens=DIGITS, temperature=0, logprobs=2
    )
    choice = reply.choices[0]
    assert re.fullmatch(rf"\d{{{DIGITS}}}", choice.text)
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == DIGITS
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.top_logprobs is not None
    for chosen, token, top in zip(
        choice.logprobs.token_logprobs or [], choice.logprobs.tokens or [], choice.logprobs.top_logprobs, strict=True
    ):
        assert chosen is not None
        assert chosen == max(top.values()) == top[token]
        assert sum(2.718281828**value for value in top.values()) <= 1.001


def test_chat_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content
    assert entries
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3


def test_streams_say_the_same(client: OpenAI) -> None:
    text = document(900, seed=3)
    word, number = next(iter(text.facts.items()))
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": text.text + chat_question(word)}],
        "max_tokens": 32,
        "temperature": 0,
    }
    # The first of these fills the prefix cache; from then on every answer starts from the same rows.
    whole = [client.chat.completions.create(**asked) for _ in range(2)][1].choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    # Two bits may cost a digit of one fact; how many facts they cost is measured elsewhere.
    assert re.fullmatch(rf"The magic number for {word} is \d{{{len(str(number))}}}\.", whole or "")
    assert len([piece for piece in pieces if piece]) > 3
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > DIGITS
    completed = {"model": NAME, "prompt": text.text + question(word), "max_tokens": DIGITS, "temperature": 0}
    whole = [client.completions.create(**completed) for _ in range(2)][1].choices[0].text
    stream = client.completions.create(**completed, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole
    assert whole.isdigit()


def test_several_choices(client: OpenAI) -> None:
    """Greedy choices of one prompt are the same; sampled ones differ."""
    text = document(900, seed=4)
    prompt = text.text + question(next(iter(text.facts)))
    client.completions.create(model=NAME, prompt=prompt, max_tokens=DIGITS, temperature=0)
    # From here on every answer starts from the same rows.
    greedy = client.completions.create(model=NAME, prompt=prompt, max_tokens=DIGITS, temperature=0, n=3)
    assert len({choice.text for choice in greedy.choices}) == 1
    assert greedy.choices[0].text.isdigit()
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    sampled = client.completions.create(model=NAME, prompt=text.text, max_tokens=24, temperature=1.0, n=4)
    assert len({choice.text for choice in sampled.choices}) > 1


def test_second_turn_hits_generated_text(client: OpenAI, server: Server) -> None:
    """The hit covers the first prompt and most of what the server itself generated; the answer is a cold one's."""
    text = document(900, seed=5)
    first, second = list(text.facts)[:2]
    prompt = token_ids(text.text + question(first))
    answer = server.generate(prompt, 448)["output_ids"]
    more = token_ids(question(second))
    follow_up = prompt + answer + more
    reply = server.generate(follow_up, DIGITS, **LOGPROBS)
    cached = reply["meta_info"]["cached_tokens"]
    assert cached == (len(follow_up) - RECENT) // 64 * 64
    assert cached > len(prompt) + 64
    assert reply["text"].isdigit()
    server.flush()
    assert_same([server.generate(follow_up, DIGITS, **LOGPROBS)], [reply], near_tie=1.5, drift=1.0)


def test_chat_of_two_turns(client: OpenAI) -> None:
    """As a chat: the whole history comes back with the second question and most of it is found in the cache."""
    text, later = document(900, seed=6), document(700, seed=7)
    first, second = list(text.facts)[:2]
    messages = [{"role": "user", "content": text.text + chat_question(first)}]
    options = {"model": NAME, "max_tokens": 32, "temperature": 0}
    one = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    assert re.fullmatch(rf"The magic number for {first} is \d{{{DIGITS}}}\.", one.choices[0].message.content)
    messages += [
        {"role": "assistant", "content": one.choices[0].message.content},
        {"role": "user", "content": later.text + chat_question(second)},
    ]
    two = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    assert re.fullmatch(rf"The magic number for {second} is \d{{{DIGITS}}}\.", two.choices[0].message.content)
    assert two.usage.prompt_tokens_details.cached_tokens >= one.usage.prompt_tokens // 64 * 64


def test_abort_by_disconnecting(client: OpenAI, server: Server) -> None:
    """A client that goes away ends its request long before the tokens that it asked for, and frees its memory."""
    begin = len(server.text())
    stream = client.completions.create(
        model=NAME, prompt="import os\n", max_tokens=7000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert loads(server)[0] == 1
    stream.close()
    wait_for(lambda: loads(server)[0] == 0, "the request ends")
    held = [int(number) for number in re.findall(r"Decode batch.*#token: (\d+)", server.text()[begin:])]
    assert max(held, default=0) < 6000


def test_abort_by_request(client: OpenAI, server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, token_ids("import os\n"), 7000, rid="to-be-aborted")
        wait_for(lambda: loads(server)[1] > 0, "the request runs")
        requests.post(f"{server.url}/abort_request", json={"rid": "to-be-aborted"}, timeout=600).raise_for_status()
        reply = running.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["meta_info"]["completion_tokens"] < 7000


def test_concurrent_equals_sequential(client: OpenAI, server: Server) -> None:
    """12 requests of mixed lengths at once, retracted all the time, answer as they do one at a time.

    A retracted request computes its newest tokens again, from quantized history this time, so log probabilities
    move; digits and text may do so only where the two best tokens are closer than quantization moves them.
    """
    texts = [document(448 + 112 * number, seed=100 + number, facts=2) for number in range(12)]
    facts = [next(iter(text.facts.items())) for text in texts]
    prompts = [token_ids(text.text + question(word)) for text, (word, _) in zip(texts, facts, strict=True)]

    def ask(ids: list[int]) -> dict:
        return server.generate(ids, 12, **LOGPROBS)

    alone = [ask(ids) for ids in prompts]
    server.flush()
    before = retracted(server)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, prompts))
    assert retracted(server) > before
    right = [answer["text"].startswith(number) for answer, (_, number) in zip(alone, facts, strict=True)]
    assert sum(right) >= 9, "the model should recall most facts from the quantized cache"
    # Two bits may turn a digit over on the way through a retraction; a fault in bookkeeping turns all of them over.
    found = [first_difference(x, y) for x, y in zip(alone, together, strict=True)]
    assert sum(one is None or one.gap <= 1.5 for one in found) >= 11


def checkpoint_of(folder: Path, wanted: str) -> Path:
    """The model's folder with only those weights whose names this expression finds."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {name: x for name, x in load_file(MODEL / "model.safetensors").items() if re.search(wanted, name)}
    assert weights
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("wanted", ["", "embed|norm", r"layers\.1\.self_attn\.v_proj|layers\.2\.self_attn\.o_proj"])
def test_weights_from_disk_keep_answers(wanted: str, client: OpenAI, server: Server, tmp_path: Path) -> None:
    """Reloading all of them, or some, leaves log probabilities the same to the last bit."""
    ids = token_ids(document(600, seed=8).text)
    server.flush()
    before = server.generate(ids, 16, **LOGPROBS)
    path = str(checkpoint_of(tmp_path / "model", wanted))
    reply = requests.post(f"{server.url}/update_weights_from_disk", json={"model_path": path}, timeout=1500)
    assert reply.json()["success"] is True, reply.text
    after = server.generate(ids, 16, **LOGPROBS)
    assert after["meta_info"]["cached_tokens"] == 0
    for answer in (before, after):
        del answer["meta_info"]["e2e_latency"]
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]


def test_bad_requests(client: OpenAI, server: Server) -> None:
    """Each gets an error that says what is wrong, and the server goes on."""
    with pytest.raises(BadRequestError, match="context length"):
        client.completions.create(model=NAME, prompt=[5] * 9000, max_tokens=4)
    with pytest.raises(BadRequestError, match=r"max_(new_)?tokens"):
        client.completions.create(model=NAME, prompt="x", max_tokens=-3)
    with pytest.raises(BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="x", max_tokens=3, temperature=-1)
    with pytest.raises(NotFoundError):
        client.get("/nowhere", cast_to=object)
    malformed = requests.post(
        f"{server.url}/v1/completions", data="{", headers={"Content-Type": "application/json"}, timeout=600
    )
    assert malformed.status_code in (400, 422)
    assert json.loads(malformed.text)
    ordinary = client.completions.create(model=NAME, prompt="import", max_tokens=3, temperature=0)
    assert ordinary.choices[0].text


def test_start_up_account(client: OpenAI, server: Server) -> None:
    """Every setting and the whole memory account are logged once."""
    text = server.text()
    assert text.count("int2 settings: ") == 1
    for name in ("SGLANG_OSCAR_K_CLIP_RATIO", "SGLANG_MIXED_KV_RECENT_TOKENS=256", "SGLANG_MIXED_KV_HP_MAX_SPLITS=8"):
        assert name in text
    for what in ("history pool: 24576 tokens", "2.50 bits per element, group 64", "window buffers: ", "at 8K"):
        assert text.count(what) == 1, what
