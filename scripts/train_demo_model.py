"""Train the bundled demo model: a small llama on the text that every Python carries.

Quantization is worth testing only on weights that mean something: noise has no outliers, no
redundancy, and nothing to lose. This script makes such weights in under an hour on one core. It
learns a byte-level BPE from the training topics of `demo_text`, then trains a decoder with
grouped-query attention whose every linear takes a multiple of 256 inputs, so that K-quants apply.

The recipe is what makes an hour enough: the forward and backward passes run in bfloat16 while the
master weights stay in float32; matrices are updated by Muon (a momentum step whose singular values
are all made equal, so that rare directions learn as fast as common ones), the embedding and the
norms by AdamW; the learning rate warms up, holds, falls slowly and then cools down to zero; most
steps see short windows, which cost less and so allow more steps, the last ones see long windows.

    python scripts/train_demo_model.py --out models/demo --state demo-state.pt

An interrupted run continues from its state file. The calibration text watches the training, and
the evaluation text measures the result; neither is trained on.
"""

import argparse
import json
import lzma
import math
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_text
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

Penalty = Callable[[list[Tensor]], Tensor]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, END_OF_TURN = 0, 2
VOCABULARY, CONTEXT_LIMIT = 4096, 1024
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result, apart from the text and the versions."""

    seed: int = 20261120
    steps: int = 1400
    lengthen_at: int = 1200
    batch: int = 8
    short_context: int = 256
    context: int = 512
    warmup: int = 20
    decay_at: int = 700
    decay_steps: int = 1600
    cooldown_steps: int = 600
    matrix_rate: float = 0.02
    adam_rate: float = 6e-3
    weight_decay: float = 0.1


# --- the tokenizer -------------------------------------------------------------------------


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Learn a byte-level BPE; any text round-trips, because every byte is in the alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    end = SPECIAL_TOKENS[END_OF_TEXT]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LIMIT,
    }
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


# --- the data ------------------------------------------------------------------------------


def training_strings() -> list[str]:
    """Return the training documents; pages of documentation become turns of a chat."""
    chats = [
        f"<|im_start|>user\nExplain {page.name}.<|im_end|>\n"
        f"<|im_start|>assistant\n{page.text}<|im_end|>\n"
        for page in demo_text.training_pages()
    ]
    return [*(document.text for document in demo_text.training_documents()), *chats]


def encode_corpus(tokenizer: Tokenizer, texts: list[str], seed: int) -> Tensor:
    """Return all documents as one row of tokens, in shuffled order, each after <|endoftext|>."""
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    encoded = tokenizer.encode_batch([texts[index] for index in order])
    return torch.tensor([token for item in encoded for token in (END_OF_TEXT, *item.ids)])


class Windows:
    """Training windows: each pass cuts the text at another offset and shuffles the pieces."""

    def __init__(self, tokens: Tensor, context: int, settings: Settings) -> None:
        """Cut `tokens` into windows of `context` + 1 (the last one only as a target)."""
        self._tokens, self._context, self._batch = tokens, context, settings.batch
        self._random = torch.Generator().manual_seed(settings.seed + context)
        self._starts: list[int] = []

    def next_batch(self) -> Tensor:
        """Return [batch, context + 1] tokens."""
        while len(self._starts) < self._batch:
            self._starts += self._one_pass()
        starts, self._starts = self._starts[: self._batch], self._starts[self._batch :]
        return torch.stack([self._tokens[s : s + self._context + 1] for s in starts])

    def _one_pass(self) -> list[int]:
        offset = int(torch.randint(self._context, (1,), generator=self._random))
        count = (len(self._tokens) - 1 - offset) // self._context
        order = torch.randperm(count, generator=self._random)
        return (order * self._context + offset).tolist()


# --- the optimizer -------------------------------------------------------------------------


def orthogonalize(matrices: Tensor, dtype: torch.dtype, rounds: int = 5) -> Tensor:
    """Bring the singular values of each matrix near one (Newton-Schulz, Muon's quintic).

    Takes [count, rows, columns]; wide matrices are iterated as they are, tall ones transposed, so
    that the Gram matrix is the small one. bfloat16 is precise enough for a direction, and faster
    where a processor has it.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient in float32; every parameter has one after a backward pass."""
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad.float()


class Muon:
    """Muon for all matrices of one shape at once, with float32 master weights.

    A stack of experts ``[experts, rows, columns]`` is as many matrices; one whose name says that gate
    and up lie in it is two for each.
    """

    def __init__(
        self, parameters: list[Tensor], rate: float, weight_decay: float, parts: int = 1
    ) -> None:
        """Take the parameters; every step writes them anew from the masters."""
        self._parameters, self._rate, self._weight_decay = parameters, rate, weight_decay
        rows, columns = parameters[0].shape[-2:]
        self._shape = (-1, rows // parts, columns)
        self._master = torch.stack([p.detach().float() for p in parameters]).view(self._shape)
        self._momentum = torch.zeros_like(self._master)

    def step(self, scale: float) -> None:
        """Apply one update with the learning rate times `scale`."""
        gradient = torch.stack([_gradient(p) for p in self._parameters]).view(self._shape)
        self._momentum.lerp_(gradient, 0.05)
        update = orthogonalize(gradient.lerp(self._momentum, 0.95), self._parameters[0].dtype)
        rows, columns = update.shape[-2:]
        rate = scale * self._rate
        self._master.mul_(1 - rate * self._weight_decay)
        self._master.sub_(update, alpha=rate * math.sqrt(max(1.0, rows / columns)))
        masters = self._master.view(len(self._parameters), *self._parameters[0].shape)
        for parameter, master in zip(self._parameters, masters, strict=True):
            parameter.data.copy_(master)


class Adam:
    """AdamW without decay for the embedding and the norms, with float32 master weights."""

    def __init__(self, parameters: list[Tensor], rate: float) -> None:
        """Take the parameters; every step writes them anew from the masters."""
        self._parameters = parameters
        self._masters = [p.detach().float().clone() for p in parameters]
        self._rate = rate
        self._adam = torch.optim.AdamW(
            self._masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10, fused=True
        )

    def step(self, scale: float) -> None:
        """Apply one update with the learning rate times `scale`."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = _gradient(parameter)
        self._adam.param_groups[0]["lr"] = scale * self._rate
        self._adam.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.data.copy_(master)


def optimizers(model: PreTrainedModel, settings: Settings) -> list[Muon | Adam]:
    """Return one Muon for each shape of matrix in the blocks and one Adam for the rest.

    Routers, gates of one row and convolutions belong to the rest: their singular values mean something.
    """
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim >= 2 and min(parameter.shape[-2:]) >= 16:
            parts = 2 if name.endswith(".gate_up_proj") else 1
            by_shape.setdefault((parts, *parameter.shape), []).append(parameter)
    matrices = {id(p) for group in by_shape.values() for p in group}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    muons = [
        Muon(group, settings.matrix_rate, settings.weight_decay, parts)
        for (parts, *_), group in by_shape.items()
    ]
    return [*muons, Adam(rest, settings.adam_rate)]


def rate_scale(step: int, settings: Settings) -> float:
    """Return the share of the full learning rate: warmup, plateau, slow fall, cooldown to zero."""
    warmup = (step + 1) / settings.warmup
    decay = (settings.decay_at + settings.decay_steps - step) / settings.decay_steps
    cooldown = (settings.steps - step) / settings.cooldown_steps
    return min(1.0, warmup, decay, cooldown)


# --- model, loss and training --------------------------------------------------------------


def make_model() -> LlamaForCausalLM:
    """Build the untrained decoder; every linear takes 256 or 768 inputs."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LIMIT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        attention_bias=False,
        mlp_bias=False,
    )
    return LlamaForCausalLM(config).bfloat16()


class HeadLoss(torch.autograd.Function):
    """The output matrix and its cross entropy, a cache-sized piece of the logits at a time.

    All logits together are 4096 numbers per token, and every pass over them goes to main memory;
    the gradient is therefore formed while a piece is at hand, and its logits are never kept.
    """

    @staticmethod
    def forward(context: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `hidden` [tokens, features] and keep both gradients."""
        total = torch.zeros(())
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros(weight.shape)
        for start in range(0, len(targets), 256):
            rows = slice(start, start + 256)
            logits = functional.linear(hidden[rows], weight).float()
            picked = targets[rows, None]
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm - logits.gather(1, picked)).sum()
            error = logits.sub_(norm).exp_().scatter_add_(1, picked, -torch.ones(len(picked), 1))
            error = error.to(weight.dtype)
            to_hidden[rows] = error @ weight
            to_weight += error.mT @ hidden[rows]
        context.save_for_backward(to_hidden, to_weight)
        return total / len(targets)

    @staticmethod
    def backward(context: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale the gradients that the forward pass kept."""
        to_hidden, to_weight = context.saved_tensors  # type: ignore[attr-defined]
        scale = (gradient / len(to_hidden)).to(to_hidden.dtype)
        return to_hidden * scale, (to_weight * scale).to(to_hidden.dtype), None


def mean_loss(model: PreTrainedModel, windows: Tensor, penalty: Penalty | None = None) -> Tensor:
    """Return the mean negative log likelihood in nats of each window's tokens but the first.

    ``penalty`` adds to it what it makes of the logits of the routers, a tensor for each mixture.
    """
    routers: list[Tensor] = []
    gates = [] if penalty is None else [layer.mlp.gate for layer in model.model.layers]
    hooks = [g.register_forward_hook(lambda _, __, out: routers.append(out[0])) for g in gates]
    outputs = model.model(input_ids=windows[:, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    targets = windows[:, 1:].flatten()
    weight, hidden = model.lm_head.weight, outputs.last_hidden_state
    loss: Tensor = HeadLoss.apply(hidden.flatten(0, 1), weight, targets)  # type: ignore[no-untyped-call]
    return loss if penalty is None else loss + penalty(routers)


@torch.no_grad()
def score(
    model: PreTrainedModel, tokenizer: Tokenizer, text: str, context: int
) -> dict[str, float]:
    """Measure nats per token and bits per byte over windows of `context` that do not overlap.

    A window's first token has no context and is not scored; neither are its bytes.
    """
    item = tokenizer.encode(text)
    lengths = torch.tensor([len(token) for token in item.tokens])  # one character is one byte
    tokens = torch.tensor(item.ids)
    nats, scored, size = 0.0, 0, 0
    for start in range(0, len(tokens) - context + 1, context):
        window = tokens[start : start + context]
        nats += float(mean_loss(model, window[None])) * (context - 1)
        scored += context - 1
        size += int(lengths[start + 1 : start + context].sum())
    return {"nats_per_token": nats / scored, "bits_per_byte": nats / math.log(2) / size}


class Run:
    """A training run: everything that the next step depends on, and its log.

    One pickle of this object is a complete state: the optimizers' references to the parameters
    survive, so a run that was interrupted continues bit for bit.
    """

    def __init__(
        self,
        settings: Settings,
        corpus: Tensor,
        make: Callable[[], PreTrainedModel],
        penalty: Penalty | None,
    ) -> None:
        """Build the untrained model, its optimizers and its two streams of windows."""
        torch.manual_seed(settings.seed)
        self.model = make()
        self._penalty = penalty
        self.log: list[dict[str, float]] = []
        self._steppers = optimizers(self.model, settings)
        self._short = Windows(corpus, settings.short_context, settings)
        self._long = Windows(corpus, settings.context, settings)
        self._step, self._smooth, self._seconds = 0, math.log(self.model.config.vocab_size), 0.0

    def advance(self, settings: Settings) -> None:
        """Take ten steps and log them."""
        began = time.monotonic()
        for _ in range(10):
            loss = self._one_step(settings)
            self._smooth += 0.05 * (loss - self._smooth)
        self._seconds += time.monotonic() - began
        record = {"step": self._step, "loss": self._smooth, "seconds": self._seconds}
        self.log.append({name: round(value, 4) for name, value in record.items()})

    def watch(self, windows: Tensor) -> None:
        """Add the loss on text that is not trained on to the last record."""
        with torch.no_grad():
            self.log[-1]["calibration_loss"] = round(mean_loss(self.model, windows).item(), 4)

    def _one_step(self, settings: Settings) -> float:
        windows = self._short if self._step < settings.lengthen_at else self._long
        loss = mean_loss(self.model, windows.next_batch(), self._penalty)
        loss.backward()  # type: ignore[no-untyped-call]
        for stepper in self._steppers:
            stepper.step(rate_scale(self._step, settings))
        self.model.zero_grad(set_to_none=True)
        self._step += 1
        return loss.item()


def train(run: Run, settings: Settings, watch: Tensor, state: Path) -> Run:
    """Train to the end of the schedule, from `state` if it exists, and save to it on the way."""
    if state.exists():
        run = torch.load(state, weights_only=False)  # written by this script, so trusted
    while len(run.log) * 10 < settings.steps:
        run.advance(settings)
        if len(run.log) % 10 == 0:
            run.watch(watch)
            torch.save(run, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
            sys.stdout.write(json.dumps(run.log[-1]) + "\n")
            sys.stdout.flush()
    return run


# --- what is written -----------------------------------------------------------------------


def save_weights(model: PreTrainedModel, out: Path) -> None:
    """Write model.safetensors in bfloat16, config.json and generation_config.json."""
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT,
        eos_token_id=[END_OF_TEXT, END_OF_TURN],
        pad_token_id=END_OF_TEXT,
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config |= {"torch_dtype": config["dtype"], "rope_theta": 10000.0}  # for older readers
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokens_seen(settings: Settings) -> int:
    """Return the number of tokens that the whole schedule trains on."""
    short = min(settings.steps, settings.lengthen_at)
    long = settings.steps - short
    return settings.batch * (short * settings.short_context + long * settings.context)


def xz_bits_per_byte(text: str) -> float:
    """Return what `xz -9e` needs for the text, in bits per byte."""
    data = text.encode()
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def describe(
    settings: Settings, tokenizer: Tokenizer, model: PreTrainedModel, corpus_tokens: int
) -> dict[str, Any]:
    """Measure the finished model on the evaluation text and gather what the card must say."""
    evaluation, calibration = demo_text.evaluation_text(), demo_text.calibration_text()
    training = demo_text.training_text()
    texts = {"training": training, "calibration": calibration, "evaluation": evaluation}
    held_out = score(model, tokenizer, evaluation, settings.context)
    xz = xz_bits_per_byte(evaluation)
    return {
        "settings": asdict(settings),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bytes": {name: len(text.encode()) for name, text in texts.items()},
        "sha256": {name: demo_text.digest(text) for name, text in texts.items()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus_tokens": corpus_tokens,
        "tokens_seen": tokens_seen(settings),
        "held_out": held_out,
        "xz_bits_per_byte": xz,
        "ratio_to_xz": held_out["bits_per_byte"] / xz,
    }


def make_and_describe(
    settings: Settings,
    vocabulary: int,
    make: Callable[[], PreTrainedModel],
    penalty: Penalty | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Read the command line, train the tokenizer and the model, write both, and report for the card."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--state", type=Path, required=True, help="file to resume from")
    options, _ = parser.parse_known_args()
    out = options.out
    torch.set_num_threads(1)  # the order of sums, and so the result, depends on this number
    out.mkdir(parents=True, exist_ok=True)
    texts = training_strings()
    tokenizer = train_tokenizer(texts, vocabulary)
    save_tokenizer(tokenizer, out)
    corpus = encode_corpus(tokenizer, texts, settings.seed)
    watch = torch.tensor(tokenizer.encode(demo_text.calibration_text()).ids)
    watch = watch[: 32 * settings.context].view(32, settings.context)
    run = train(Run(settings, corpus, make, penalty), settings, watch, options.state)
    save_weights(run.model, out)
    (out / "training_log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run.log))
    report = describe(settings, tokenizer, run.model, len(corpus))
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return run.model, tokenizer


if __name__ == "__main__":
    make_and_describe(Settings(), VOCABULARY, make_model)
