"""Talking to a model: text as transformers generates it, in every format; chat, comparison, errors, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quantforge
from quantforge.cli.app import main
from quantforge.cli.generate import speed_text
from quantforge.errors import RefusedError, UsageError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load
from quantforge.runtime.text_processing import load_text_processor
from quantforge_kernels.cpu import instruction_sets
from tests.choices import plain_text
from tests.conftest import Tiny
from tests.plain_loop import StopLimits
from tests.runs import copy_model, run_command
from tests.thorough import parametrize_each_value

DEMO = Path(__file__).parents[2] / "models/demo"
TEMPLATE = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def templated(model: Path, to: Path, template: str = TEMPLATE) -> Path:
    copy_model(model, to)
    (to / "chat_template.jinja").write_text(template)
    return to


def greedy(model: Path, text: str, count: int) -> list[int]:
    """What transformers' own generation takes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = peer.generate(**ids, max_new_tokens=count, do_sample=False)
    return out[0, ids["input_ids"].shape[1] :].tolist()


# ---- what is generated


@pytest.mark.tokens
@pytest.mark.parametrize("text", ["import os\n\ndef ", "class"])
def test_text_is_completed_as_transformers_does(text: str) -> None:
    loaded = quantforge.load(DEMO)
    found = quantforge.generate(loaded, text, raw=True, max_tokens=24)
    assert list(found.tokens) == greedy(DEMO, text, 24)
    assert not found.templated
    assert found.decoder == "own"
    assert found.stopped == "length"


@pytest.mark.tokens
def test_the_template_renders_the_prompt_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    talk = [{"role": "user", "content": "Explain json."}]
    text = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    loaded = quantforge.load(DEMO)
    pieces: list[str] = []
    found = quantforge.generate(loaded, "Explain json.", max_tokens=16, stream=pieces.append)
    assert found.templated
    assert list(found.tokens) == greedy(DEMO, text, 16)
    assert "".join(pieces) == found.text
    assert len(pieces) > 4
    assert quantforge.generate(loaded, talk, max_tokens=16).tokens == found.tokens


@pytest.mark.parametrize(
    ("family", "decoder"), [("llama", "own"), ("gpt2", "transformers"), ("mixtral", "own")]
)
def test_any_family_answers_and_says_with_which_decoder(
    tiny: Tiny, family: str, decoder: str
) -> None:
    found = quantforge.generate(tiny(family), "one two", max_tokens=5)
    assert found.decoder == decoder
    assert 0 < len(found.tokens) <= 5


@pytest.mark.tokens
def test_a_gguf_file_and_other_formats_answer_like_their_numbers(tmp_path: Path) -> None:
    made = tmp_path / "made"
    quantforge.quantize(DEMO, scheme="int4:g32:sym:f16", scales="absmax", out=made)
    quantforge.export(made, format="gguf", out=tmp_path / "made.gguf")
    one, two = (
        quantforge.generate(path, "Explain json.", max_tokens=12)
        for path in (made, tmp_path / "made.gguf")
    )
    assert one.tokens == two.tokens
    assert one.templated
    assert two.templated


@pytest.mark.tokens
def test_tokens_that_end_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    """Those of generation_config.json, those of the configuration where it says none, and of the tokenizer."""
    model = copy_model(tiny("llama"), tmp_path / "model")
    loaded = load(model)
    first = quantforge.generate(loaded, "one", max_tokens=8)
    ending = first.tokens[2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, ending]}))
    assert load_text_processor(model, loaded.config).stop == {300, ending, 1}
    second = quantforge.generate(loaded, "one", max_tokens=8)
    assert second.tokens == first.tokens[: first.tokens.index(ending)]
    assert second.stopped == "end"
    (model / "generation_config.json").write_text("{}")
    assert load_text_processor(model, {"eos_token_id": 7}).stop == {7, 1}


@pytest.mark.tokens
def test_sampling_is_seeded_and_greedy_without() -> None:
    loaded = quantforge.load(DEMO)
    drawn = [
        quantforge.generate(loaded, "import", raw=True, max_tokens=12, temperature=1.0, seed=seed).text
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]


# ---- the command


@pytest.mark.tokens
def test_the_command_streams_text_and_says_its_speed(capsys, tmp_path: Path) -> None:
    result = run_command(capsys, "generate", DEMO, "Explain json.", "--max-tokens", "8")
    assert result.code == 0
    assert result.out == quantforge.generate(DEMO, "Explain json.", max_tokens=8).text + "\n"
    assert "tokens/s" in result.err
    assert "cut by --max-tokens" in " ".join(result.err.split())
    assert result.err.startswith(f"loading {DEMO}\n")
    quiet = run_command(capsys, "generate", DEMO, "Explain json.", "--max-tokens", "8", "-q")
    assert (quiet.out, quiet.err) == (result.out, "")
    bare = copy_model(DEMO, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    base = run_command(capsys, "generate", bare, "one", "--max-tokens", "2")
    assert "no chat template: it completes the prompt as text" in base.err


def test_a_model_is_said_to_load_before_torch_is_there() -> None:
    code = (
        "import sys; from quantforge.cli.console import Console as C; from quantforge.cli import app; "
        "C.note = lambda self, text: sys.exit(text + str('torch' in sys.modules)); app.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", DEMO, "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == f"loading {DEMO}False"


def test_standard_input_is_the_prompt(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(data: bytes) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run_command(capsys, "generate", DEMO, "--max-tokens", "4", "--json")

    found = json.loads(piped(b"Explain json.\n").out)
    assert found["schema"] == "quantforge.generate/2"
    assert found["prompt"] == "Explain json."
    (answer,) = found["answers"]
    assert answer["chat_template"]
    assert len(answer["tokens"]) == 4
    assert piped(b"\n").code == 2
    assert piped(b"\xff").code == 3

    class Endless(io.RawIOBase):
        read_so_far = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            Endless.read_so_far += len(buffer)
            assert Endless.read_so_far < 1 << 24
            buffer[:] = b"y" * len(buffer)
            return len(buffer)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    endless = run_command(capsys, "generate", DEMO, "--json")
    assert endless.code == 3
    assert "more than 4194304 bytes" in endless.err


@pytest.mark.tokens
def test_several_models_answer_the_same_prompt(capsys, tmp_path: Path) -> None:
    worse = tmp_path / "worse"
    quantforge.quantize(DEMO, scheme="int2:g128:sym:f16", scales="absmax", out=worse)
    asked = (
        "generate",
        DEMO,
        "Explain json.",
        "--max-tokens",
        "9",
        "--compare",
        DEMO,
        "--compare",
        worse,
    )
    result = run_command(capsys, *asked)
    heads = [line for line in result.out.splitlines() if line.startswith("== ")]
    assert heads == [f"== {DEMO}", f"== {DEMO}", f"== {worse}"]
    assert "the same answer as" in result.err
    assert result.err.count("loading ") == 3
    assert "differs from" in result.err
    answers = json.loads(run_command(capsys, *asked, "--json").out)["answers"]
    assert answers[0]["tokens"] == answers[1]["tokens"] != answers[2]["tokens"]


def test_a_model_that_cannot_answer_is_refused_before_the_first_answers(
    capsys, tiny: Tiny, tmp_path: Path
) -> None:
    mute = copy_model(tiny("llama"), tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    asked = ("generate", DEMO, "x", "--max-tokens", "1", "--compare")
    for other, code, word in (("./nosuch", 3, "nosuch"), (mute, 3, "no tokenizer.json")):
        result = run_command(capsys, *asked, other)
        assert (result.code, result.out) == (code, "")
        assert word in result.err
    plain = copy_model(DEMO, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    result = run_command(capsys, *asked, plain, "--system", "Be brief.")
    assert (result.code, result.out) == (2, "")
    assert "plain has no chat template" in result.err


def test_speeds_are_written_without_powers_of_ten() -> None:
    figures = {"prompt_tokens_per_second": 1240.4, "tokens_per_second": 98765.4}
    answer = SimpleNamespace(
        choices=[SimpleNamespace(tokens=[1])], prompt_tokens=9, stopped="end", speculation=None,
        processor_share=0.95, **figures,
    )  # fmt: skip
    said = speed_text(answer, 9)  # type: ignore[arg-type]
    assert said == "prompt 9 tokens, 1240 tokens/s; answer 1 tokens, 98800 tokens/s"


def test_a_speed_that_other_programs_slowed_down_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantforge.cli.generate.FULL_SHARE", 0.9)
    figures = {
        "prompt_tokens_per_second": 1240.4,
        "tokens_per_second": 98765.4,
        "speculation": None,
    }
    choices = [SimpleNamespace(tokens=[1])]
    answer = SimpleNamespace(
        choices=choices, prompt_tokens=9, stopped="end", processor_share=0.61, **figures
    )
    said = speed_text(answer, 9)  # type: ignore[arg-type]
    assert said.endswith(
        "; slowed down by other programs (the threads got 61% of the processor time)"
    )
    answer.processor_share = 0.95
    assert "slowed" not in speed_text(answer, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "word"), [(3, "--max-tokens"), (4, "the end of the context")])
def test_what_has_cut_an_answer_is_told(most: int, word: str) -> None:
    figures = {
        "prompt_tokens_per_second": 1.0,
        "tokens_per_second": 1.0,
        "speculation": None,
        "processor_share": None,
    }
    choices = [SimpleNamespace(tokens=[1, 2, 3])]
    answer = SimpleNamespace(choices=choices, prompt_tokens=9, stopped="length", **figures)
    assert f", cut by {word}" in speed_text(answer, most)  # type: ignore[arg-type]


@pytest.mark.tokens
def test_stop_strings_several_answers_and_log_probabilities(capsys) -> None:
    asked = ("generate", DEMO, "import os", "--raw", "--max-tokens", "24")
    plain = run_command(capsys, *asked, "-q").out
    stop = plain[20:24]
    ended = run_command(capsys, *asked, "--stop", "never there", "--stop", stop)
    assert ended.out == plain[: plain.index(stop)] + "\n"
    assert "ended by --stop" in ended.err
    with_it = run_command(capsys, *asked, "--stop", stop, "--include-stop", "-q")
    assert with_it.out == ended.out[:-1] + stop + "\n"
    several = run_command(
        capsys, *asked, "-n", "2", "--temperature", "1", "--min-p", "0.1", "--seed", "5"
    )
    first, second = several.out.split("== 2 of 2\n")
    assert "2 answers 48 tokens" in several.err
    one = ("--temperature", "1", "--min-p", "0.1", "--json", "--logprobs", "2")
    (found,) = json.loads(run_command(capsys, *asked, *one, "--seed", "6").out)["answers"]
    assert found["text"] + "\n" == second != first
    (choice,) = found["choices"]
    assert choice["text"] == found["text"]
    assert [token["id"] for token in choice["logprobs"]] == found["tokens"]
    assert len(choice["logprobs"][0]["top_logprobs"]) == 2


PROMPT = "The river"  # after which the cache changes the text, and every token is clear


@pytest.mark.tokens
def test_a_cache_of_fewer_bits_is_taken_by_every_way_to_answer(capsys) -> None:
    told = [
        json.loads(
            run_command(capsys, "generate", str(DEMO), PROMPT, "--raw", "--max-tokens", "60", "--json", *more).out
        )
        for more in ((), ("--cache", "k=int8,v=int4"), ("--cache", "k=int8,v=int4", "--draft", "ngram"))
    ]  # fmt: skip
    plain, cached, guessed = (found["answers"][0]["tokens"] for found in told)
    assert cached != plain
    ids = load_text_processor(DEMO, {}).tokenizer.encode(PROMPT)
    wanted = plain_text(Decoder(load(DEMO).model), ids, StopLimits(60, cache="k=int8,v=int4"))
    assert len(wanted) > 10
    assert cached[: len(wanted)] == guessed[: len(wanted)] == wanted[: len(cached)]


def test_a_cache_is_refused_where_transformers_has_its_own(tiny: Tiny) -> None:
    with pytest.raises(RefusedError, match="computed by transformers"):
        quantforge.generate(tiny("gpt2"), "import", cache="int8")
    with pytest.raises(UsageError, match="once each"):
        quantforge.generate(DEMO, "import", cache="k=int8")


@pytest.mark.tokens
def test_bias_penalties_and_beams(capsys) -> None:
    asked = ("generate", DEMO, "import os", "--raw", "--max-tokens", "12", "--json")

    def tokens(*more: str) -> list[int]:
        (answer,) = json.loads(run_command(capsys, *asked, *more).out)["answers"]
        return answer["tokens"]

    plain = tokens()
    banned = tokens("--logit-bias", f"{plain[0]}=-100", "--logit-bias", "3=-1.5")
    assert plain[0] not in banned
    often = tokens("--frequency-penalty", "2", "--presence-penalty", "2")
    assert len(set(often)) > len(set(plain))
    beams = ("--beams", "3", "-n", "2", "--length-penalty", "0.5", "--early-stopping", "true")
    (answer,) = json.loads(run_command(capsys, *asked, *beams).out)["answers"]
    assert [one["score"] for one in answer["choices"]] == sorted(
        (one["score"] for one in answer["choices"]), reverse=True
    )


MEANINGLESS: list[tuple[tuple[str, ...], int, str]] = [
    (("--min-p", "1.5"), 2, "--min-p 1.5"),
    (("--frequency-penalty", "-3"), 2, "--frequency-penalty -3.0"),
    (("--presence-penalty", "3"), 2, "--presence-penalty 3.0"),
    (("--repetition-penalty", "-1"), 2, "--repetition-penalty -1.0"),
    (("--stop", ""), 2, "stop holds ''"),
    (("-n", "2"), 2, "temperature above 0"),
    (("-n", "2", "--temperature", "1", "--compare", "x"), 2, "--compare and -n"),
    (("--logprobs", "2"), 2, "--json"),
    (("--logprobs", "21", "--json"), 2, "--logprobs 21"),
    (("--logit-bias", "a=1"), 2, "42=-100"),
    (("--logit-bias", "1=1", "--logit-bias", "1=2"), 2, "has one already"),
    (("--logit-bias", "99999=1"), 2, "token 99999"),
    (("--beams", "0"), 2, "--beams 0"),
    (("--length-penalty", "1"), 2, "--length-penalty 1.0: without beams"),
    (("--beams", "2", "--temperature", "1"), 2, "--temperature 1.0: not with beams"),
    (("--beams", "2", "--early-stopping", "perhaps"), 2, "false, true, never"),
    (("--repeat-penalty", "1.1"), 2, "--repetition-penalty"),
    (("--num-beams", "2"), 2, "--beams"),
    (("--best-of", "2"), 2, "here it is -n"),
    (("--temperature", "nan"), 2, "--temperature nan"),
    (("--top-p", "2"), 2, "--top-p 2.0"),
    (("--max-tokens", "0"), 2, "--max-tokens"),
    (("--top-k", "-1"), 2, "--top-k -1"),
    (("--seed", "-1"), 2, "--seed -1"),
    (("--raw", "--system", "x"), 2, "--system"),
    (("--compare", "./absent"), 3, "absent"),
]


def test_values_that_mean_nothing_are_refused(capsys) -> None:
    for arguments, code, said in MEANINGLESS:
        result = run_command(capsys, "generate", DEMO, "x", "--max-tokens", "1", *arguments)
        assert result.code == code, arguments
        assert said in result.err, arguments


def test_models_and_prompts_that_do_not_fit_are_refused(capsys, tiny: Tiny, tmp_path: Path) -> None:
    mute = copy_model(tiny("llama"), tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    assert "no tokenizer.json" in run_command(capsys, "generate", mute, "x").err
    long = run_command(capsys, "generate", tiny("llama"), "word " * 200)
    assert long.code == 3
    assert "sees 128" in long.err
    hostile = templated(DEMO, tmp_path / "hostile", "{{ ''.__class__.__mro__ }}")
    refused = run_command(capsys, "generate", hostile, "x")
    assert refused.code == 3
    assert "--raw" in refused.err
    assert run_command(capsys, "generate", hostile, "x", "--raw", "--max-tokens", "1").code == 0
    room = quantforge.generate(tiny("llama"), "word " * 20, max_tokens=10_000)
    assert room.prompt_tokens + len(room.tokens) <= 128


# ---- a terminal


class Terminal:
    """A command on a terminal of its own, in a forked process, or in one that has imported nothing yet."""

    def __init__(self, *arguments: object, fresh: bool = False) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            self._run([str(argument) for argument in arguments], fresh)
        self._code: int | None = None
        self.seen = ""

    def _run(self, arguments: list[str], fresh: bool) -> None:
        """Run the command in the child, which does not return."""
        code = 70
        try:
            os.environ |= {"TERM": "dumb", "COLUMNS": "100"}
            if fresh:
                script = "from quantforge.cli.app import main; main()"
                os.execv(sys.executable, [sys.executable, "-c", script, *arguments])
            sys.argv = ["quantforge", *arguments]
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - no path
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            torch.set_num_threads(1)
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            sys.stdout.flush()
            os._exit(code)

    def ended(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        """End the process if it still runs."""
        if self.ended() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """Read until a text was shown; return what came up to then and was not returned before."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    self.seen += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError as error:  # the other side is closed
                    raise AssertionError(self.seen) from error
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._terminal, text.encode())


@contextmanager
def terminal(*arguments: object, fresh: bool = False) -> Iterator[Terminal]:
    one = Terminal(*arguments, fresh=fresh)
    try:
        yield one
    finally:
        one.kill()


def press(chat: Terminal, key: str, shown: str) -> None:
    """Press a key at the prompt until something is shown: what is typed before a prompt waits may be dropped."""
    for _ in range(60):
        chat.type(key)
        try:
            chat.wait_for(shown, 1)
        except AssertionError:
            # readline in the middle of a line that Ctrl-C has dropped waits for a key.
            chat.type(" ")
            time.sleep(0.2)
            continue
        return
    raise AssertionError(shown, chat.seen, chat.ended())


def prompt_tokens(chat: Terminal, said: str) -> int:
    """Say something, interrupt the answer when it has begun, and return how long the prompt was."""
    chat.wait_for("> ")
    chat.type(f"{said}\n")
    chat.wait_for(f"{said}\r\n")  # the echo
    chat.wait_for("e")  # the answer
    chat.type("\x03")
    return int(chat.wait_for(", interrupted").rsplit("[prompt ", 1)[1].split()[0])


@pytest.mark.thorough
def test_programs_that_are_compiled_are_told_of_before_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTFORGE_CACHE", str(tmp_path / "programs"))
    if instruction_sets.best_instruction_set() is None:
        pytest.skip("no program is compiled for this processor")
    told: list[bool] = []
    for _ in range(2):
        with terminal("generate", DEMO, "--max-tokens", "4", fresh=True) as chat:
            chat.wait_for("> ")
            chat.type("Explain json.\n")
            chat.wait_for("json.\r\n")  # the echo
            told.append(
                chat.wait_for("[prompt ").startswith("compiling programs for this processor")
            )
    assert told == [True, False]


def test_a_chat_remembers_is_interrupted_forgets_and_ends(capsys) -> None:
    run_command(
        capsys, "generate", DEMO, "Explain json.", "--max-tokens", "2"
    )  # programs are compiled
    with terminal("generate", DEMO, "--max-tokens", "900") as chat:
        first = prompt_tokens(chat, "Explain json.")
        assert prompt_tokens(chat, "Explain os.") >= first + 10  # what was said before is shown too
        chat.type("/reset\n")
        chat.wait_for("/reset\r\n")
        assert prompt_tokens(chat, "Explain json.") == first
        for pause in (0.0, 0.1):  # before and after the answer begins
            chat.wait_for("> ")
            chat.type("Explain json.\n")
            time.sleep(pause)
            press(chat, "\x03", "Ctrl-D ends")
        chat.wait_for("> ")
        press(chat, "\x03", "Ctrl-D ends")
        chat.wait_for("> ")
        while chat.ended() is None:
            chat.type("\x04")
            time.sleep(0.2)
        assert chat.ended() == 0


@parametrize_each_value(
    ("verb", ["generate", "serve", "bench"]),
    (
        "draft, said",
        [
            ("", "names nobody"),
            ("NGRAM", "did you mean 'ngram'?"),
            ("int5", "'int4'"),
            ("no such", "hint: it takes"),
        ],
    ),
)
def test_a_draft_that_nobody_is_gets_the_names(capsys, verb: str, draft: str, said: str) -> None:
    result = run_command(
        capsys, verb, DEMO, *(["x"] if verb == "generate" else []), "--draft", draft
    )
    shown = " ".join(result.err.split())
    assert (result.code, said in shown) == (2, True), shown
    assert "ngram, lookahead, int2, int3, int4, mtp, a model, or a directory of heads" in shown
    assert "loading" not in shown


def test_what_headers_and_options_refuse_comes_before_a_word_of_loading(
    capsys, tmp_path: Path
) -> None:
    pickled = tmp_path / "heads"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"medusa_num_heads": 2}')
    (pickled / "heads.pt").write_bytes(b"")
    for words, said in (
        (("--draft", pickled), "pickle"),
        (("--draft", "mtp"), "no layer for further tokens"),
        (("--draft", tmp_path), "config.json"),
        (("--temperature", "-1"), "--temperature"),
        (("--beams", "99"), "--beams"),
    ):
        result = run_command(capsys, "generate", DEMO, "x", *words)
        assert result.code in {2, 3}
        assert said in result.err
        assert "loading" not in result.err
