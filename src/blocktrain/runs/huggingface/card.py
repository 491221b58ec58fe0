"""The model card of an export: the run's own card, with the metadata and the usage of the hub."""

from __future__ import annotations

from pathlib import Path

from blocktrain.runs.folder import CARD_USAGE, ModelManifest

METADATA = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- blocktrain
- custom_code
---

"""
USAGE = """## Use it

The code of the model is in this folder, so `transformers` asks for your trust. BlockTrain need not
be installed.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```

It reads a window of {context} tokens. `generate` may write more: when the window is full, it starts
again with its last half, as in BlockTrain. A longer text at once is refused, unless only the last
logits are asked for (`logits_to_keep`)."""


def write_card(manifest: ModelManifest, name: str, folder: Path) -> None:
    """README.md"""
    usage = USAGE.format(name=name, context=manifest.config.context)
    own = manifest.run.model / "README.md"
    card = own.read_text(encoding="utf-8") if own.is_file() else short_card(manifest)
    card = card.replace(CARD_USAGE, usage) if CARD_USAGE in card else f"{card}\n{usage}\n"
    (folder / "README.md").write_text(METADATA + card, encoding="utf-8")


def short_card(manifest: ModelManifest) -> str:
    """What is known of a model that was trained elsewhere, as one that was pulled."""
    config = manifest.config
    return f"""# A BlockTrain model

{config.blocks} blocks of {config.layers_per_block} layers, width {config.width}, context
{config.context} tokens, tokenizer `{config.tokenizer}`, composed by `{manifest.compose}` (objective
`{config.objective}`). Fingerprint of the settings: `{config.fingerprint}`.

{CARD_USAGE}
"""
