"""The shape of an exported BlockTrain model."""

from typing import Any

from transformers import PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "num_hidden_layers": 8,  # of all blocks together, those of the fusion block included
    "num_attention_heads": 4,
    "max_position_embeddings": 128,  # tokens in a window; `generate` writes on beyond it
    "num_blocks": 3,  # independent blocks: each of them reads the tokens by itself
    "fusion": True,  # whether a last block corrects what the others found; else they are pooled
    "lookback": 4,  # tokens that a position knows by themselves: its own and those before it
    "shared_embedding": False,  # whether tokens are read with the heads' vectors, or own tables
    "input_offset": False,  # whether a block adds a vector of its own to every position
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class BlockTrainConfig(PretrainedConfig):
    """What config.json says. Settings that other models have too have their usual names."""

    model_type = "blocktrain"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        settings = {**DEFAULTS, **kwargs}
        for name in DEFAULTS:
            setattr(self, name, settings[name])
        super().__init__(**settings)
