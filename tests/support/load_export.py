"""What a user of an export does, in a process that cannot import BlockTrain.

usage: python -I load_export.py GUIDE.md FOLDER...   (what is expected is in FOLDER.json)
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

sys.modules["blocktrain"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: E402

torch.set_num_threads(1)


def main(folder: str, expected: dict[str, Any]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    check_tokenizer(tokenizer, expected)
    with torch.no_grad():
        check_logits(model, expected)
        check_text(model, tokenizer, expected)
        check_batch(model, tokenizer, expected)
    check_training(model, expected)
    check_copies(model, tokenizer, folder, expected)


def check_tokenizer(tokenizer: Any, expected: dict[str, Any]) -> None:
    for text, ids in expected["ids"].items():
        assert tokenizer(text).input_ids == ids, text
        assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "hello"}]
    assert "hello" in tokenizer.apply_chat_template(chat, tokenize=False)


def check_logits(model: Any, expected: dict[str, Any]) -> None:
    ids = torch.tensor([expected["window"]])
    logits = torch.tensor(expected["logits"])
    assert (model(ids).logits[0] - logits).abs().max() < 1e-5
    first = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=first.past_key_values)
    both = torch.cat([first.logits, rest.logits], dim=1)[0]
    assert (both - logits).abs().max() < 1e-5
    refused(lambda: model(torch.cat([ids, ids], dim=1)), "more tokens than the context")
    refused(lambda: model(ids, position_ids=ids), "does not take position_ids")


def refused(call: Any, words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"was not refused: {words}")


def check_text(model: Any, tokenizer: Any, expected: dict[str, Any]) -> None:
    """Greedy text far beyond the context, with and without the cache."""
    for prompt, text in expected["texts"].items():
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": expected["count"], "do_sample": False}
        for use_cache in (True, False):
            ids = model.generate(**inputs, **options, use_cache=use_cache)
            assert written(ids, inputs, tokenizer) == [text], (prompt, use_cache)
    prompt = next(iter(expected["texts"]))
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = write(prompt, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert answer["generated_text"] == tokenizer.decode(expected["texts"][prompt][:8])


def written(ids: torch.Tensor, inputs: Any, tokenizer: Any) -> list[list[int]]:
    """What was generated in each row, up to the end of its text."""
    rows = ids[:, inputs.input_ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [row[: row.index(end)] if end in row else row for row in rows]


def check_batch(model: Any, tokenizer: Any, expected: dict[str, Any]) -> None:
    """Rows of different lengths, padded on either side, are what each row is alone."""
    texts = expected["texts"]
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
    options = {"max_new_tokens": expected["count"], "do_sample": False}
    ids = model.generate(**inputs, **options)
    assert written(ids, inputs, tokenizer) == list(texts.values())
    beams = [
        model.generate(**inputs, **options, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)

    ids, room = torch.tensor(expected["window"][:6]), expected["window"][:3]
    right = torch.tensor([[*ids.tolist(), *room], expected["window"][:9]])
    mask = torch.ones_like(right)
    mask[0, 6:] = 0
    padded = model(right, attention_mask=mask).logits[0, :6]
    assert (padded - model(ids[None]).logits[0]).abs().max() < 1e-5


def check_training(model: Any, expected: dict[str, Any]) -> None:
    ids = torch.tensor([expected["window"]])
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.zero_grad()
    model.eval()
    assert abs(loss.item() - expected["loss"]) < 1e-5


def check_copies(model: Any, tokenizer: Any, folder: str, expected: dict[str, Any]) -> None:
    """save_pretrained, and another dtype."""
    copy = f"{folder}-copy"
    model.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    again: Any = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)
    ids = torch.tensor([expected["window"]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        half: Any = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.bfloat16
        )
        assert next(half.parameters()).dtype == torch.bfloat16
        assert (half(ids).logits - model(ids).logits).abs().mean() < 0.1


def run_examples(page: Path, name: str, folder: str) -> None:
    """The Python of a page, with this folder in place of the one that it names."""
    text = page.read_text().replace(name, folder)
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)):
        script = Path(f"example-{number}.py")
        script.write_text(code)
        runpy.run_path(str(script))


if __name__ == "__main__":
    guide, *folders = sys.argv[1:]
    for folder in folders:
        main(folder, json.loads(Path(f"{folder}.json").read_text()))
    run_examples(Path(guide), "models/stdlib", folders[0])
    run_examples(Path(folders[0]) / "README.md", folders[0], folders[0])
    print("as expected")
