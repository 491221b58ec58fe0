"""A BlockTrain model for `transformers`: independent blocks, and what makes one model of them.

Every block is a small language model that reads nothing but tokens. A fusion block, if there is
one, corrects the features of all blocks; the heads of the blocks read the corrected features, and
a weighted sum pools their logits.

Shapes in comments: B sequences, T tokens, W width, H heads, D = W / H, V vocabulary.

Rows of a batch may be padded on either side. Inside the model every row starts at position 0 and
padding comes last, where a causal model does not see it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_blocktrain import BlockTrainConfig

EPSILON = 1e-6
Rotation = tuple[Tensor, Tensor]


def window_start(known: Tensor, context: int) -> Tensor:
    """Where the window begins of which the last of `known` tokens is part.

    When the window is full, it starts again with its last half.
    """
    half = context // 2
    return ((known - context).clamp(min=0) + half - 1) // half * half


class BlockTrainCache(Cache):
    """What the model computed for the tokens of every row's current window."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.seen = 0  # columns of input_ids, padding included
        self.begin = torch.zeros(batch, dtype=torch.long, device=device)  # of the window in the row
        self.length = torch.zeros(batch, dtype=torch.long, device=device)  # tokens in the window
        # One more than fits: padding is written there, and never looked at.
        self.ids = torch.zeros(batch, context + 1, dtype=torch.long, device=device)
        self.keys_values: dict[str, Tensor] = {}  # by layer, (2, B, H, context + 1, D)
        self.carry: Tensor | None = None  # of the fusion block, (B, 1, W)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # the window moves

    @property
    def is_croppable(self) -> bool:
        return False

    def restart(self, begin: Tensor) -> None:
        """Forget every window; the new ones begin here."""
        self.begin, self.length, self.carry = begin, torch.zeros_like(begin), None

    def store(self, layer: str, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep keys and values (B, H, T, D) of these positions (B, T); all that is kept."""
        if layer not in self.keys_values:
            B, H, _, D = k.shape
            self.keys_values[layer] = k.new_zeros(2, B, H, self.ids.shape[1], D)
        kept = self.keys_values[layer]
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        kept[0, rows, :, positions] = k.transpose(1, 2)
        kept[1, rows, :, positions] = v.transpose(1, 2)
        return kept

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.begin, self.length, self.ids = (
            t[beam_idx] for t in (self.begin, self.length, self.ids)
        )
        self.keys_values = {name: kept[:, beam_idx] for name, kept in self.keys_values.items()}
        self.carry = None if self.carry is None else self.carry[beam_idx]


class BlockTrainStep:
    """The tokens that one call reads, and where they stand."""

    def __init__(self, ids: Tensor, counts: Tensor, cache: BlockTrainCache | None) -> None:
        """`ids` (B, T) start on the left; of row i `counts[i]` are tokens, the rest is padding."""
        B, T = ids.shape
        self.cache, self.counts = cache, counts
        place = torch.arange(T, device=ids.device)
        self.positions = place.expand(B, T) if cache is None else cache.length[:, None] + place
        self.ids = ids  # of the whole window
        self.mask: Tensor | None = None  # which keys a position sees; None: those up to its own
        self.first = cache is None or not bool(cache.length.any())
        if cache is not None:
            spare = cache.ids.shape[1] - 1
            self.positions = torch.where(place < counts[:, None], self.positions, spare)
            cache.ids.scatter_(1, self.positions, ids)
            self.ids = cache.ids
            if not self.first:
                keys = torch.arange(cache.ids.shape[1], device=ids.device)
                self.mask = (keys <= self.positions[:, :, None])[:, None]  # (B, 1, T, keys)

    def tokens_before(self, back: int) -> tuple[Tensor, Tensor]:
        """Ids (B, T) of the tokens so many places back, and whether there are such (B, T, 1)."""
        where = self.positions - back
        return self.ids.gather(1, where.clamp(min=0)), (where >= 0)[:, :, None]

    def look(self, layer: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, H, T, D): what each position takes from those it sees."""
        if self.cache is not None:
            kept = self.cache.store(layer, self.positions, k, v)
            if not self.first:
                k, v = kept
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.first)

    def shift(self, x: Tensor) -> Tensor:
        """(B, T, W) -> the same one position later."""
        before = None if self.cache is None else self.cache.carry
        before = torch.zeros_like(x[:, :1]) if before is None else before
        all_ = torch.cat([before, x], dim=1)
        if self.cache is not None:
            last = self.counts[:, None, None].expand(-1, 1, x.shape[-1])
            self.cache.carry = all_.gather(1, last)
        return all_[:, :-1]

    def finish(self) -> None:
        """The cache now holds these tokens."""
        if self.cache is not None:
            self.cache.length = self.cache.length + self.counts


class BlockTrainLayer(nn.Module):
    """Pre-norm attention and MLP, both added to the residual stream."""

    def __init__(self, config: BlockTrainConfig, name: str) -> None:
        super().__init__()
        W = config.hidden_size
        self.heads, self.name = config.num_attention_heads, name
        self.norm_attention = nn.RMSNorm(W, eps=EPSILON)
        self.qkv = nn.Linear(W, 3 * W, bias=False)
        self.attention_out = nn.Linear(W, W, bias=False)
        self.norm_mlp = nn.RMSNorm(W, eps=EPSILON)
        self.up = nn.Linear(W, 4 * W, bias=False)
        self.down = nn.Linear(4 * W, W, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, step: BlockTrainStep) -> Tensor:
        B, T, W = x.shape
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .view(B, T, 3, self.heads, W // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        a = step.look(self.name, rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.attention_out(a.transpose(1, 2).reshape(B, T, W))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class BlockTrainBlock(nn.Module):
    """Layers, and the embedding that they read."""

    def __init__(self, config: BlockTrainConfig, name: str, layers: int) -> None:
        super().__init__()
        self.width, self.heads = config.hidden_size, config.num_attention_heads
        self.embed = nn.ModuleList(
            nn.Embedding(config.vocab_size, self.width)
            for _ in range(0 if config.shared_embedding else config.lookback)
        )
        self.layers = nn.ModuleList(
            BlockTrainLayer(config, f"{name}.{number}") for number in range(layers)
        )

    def embed_tokens(self, step: BlockTrainStep, shared: list[Tensor]) -> Tensor:
        """Every position from its own token and the few before it, (B, T, W).

        Without tables of its own a block reads vectors (B, T, W) of the tokens that it shares with
        a head, one at each distance back.
        """
        if shared:
            return self.join_tokens(shared)
        vectors = []
        for back, table in enumerate(self.embed):
            ids, known = step.tokens_before(back)
            vectors.append(table(ids) * known)
        return sum(vectors[1:], vectors[0])

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def through_layers(self, x: Tensor, step: BlockTrainStep) -> Tensor:
        rotation = rotations(step.positions, self.width // self.heads)
        for layer in self.layers:
            x = layer(x, rotation, step)
        return x


class BlockTrainIndependent(BlockTrainBlock):
    """A block that reads only tokens."""

    def __init__(self, config: BlockTrainConfig, name: str, layers: int) -> None:
        super().__init__(config, name, layers)
        W, back = config.hidden_size, config.lookback - 1
        self.offset = nn.Parameter(torch.zeros(W)) if config.input_offset else None
        joins = config.shared_embedding and back
        self.look_back = nn.Linear(back * W, W, bias=False) if joins else None

    def forward(self, step: BlockTrainStep, shared: list[Tensor]) -> Tensor:
        """Its features, (B, T, W)."""
        x = self.embed_tokens(step, shared)
        return self.through_layers(x if self.offset is None else x + self.offset, step)

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        own, *before = vectors
        return own if self.look_back is None else own + self.look_back(torch.cat(before, dim=-1))


class BlockTrainFusion(BlockTrainBlock):
    """The block that corrects the features of all others."""

    def __init__(self, config: BlockTrainConfig, name: str, layers: int) -> None:
        super().__init__(config, name, layers)
        W, reads = config.hidden_size, config.num_blocks
        self.mix = nn.Linear(reads * W, W, bias=False)
        self.hand_on = nn.Linear(reads * W, W, bias=False)
        self.correct = nn.Linear(W, reads * W, bias=False)
        if config.shared_embedding:
            self.look_back = nn.Linear(config.lookback * W, W, bias=False)

    def forward(self, features: Tensor, step: BlockTrainStep, shared: list[Tensor]) -> Tensor:
        """A correction for each of the normalized features (N, B, T, W)."""
        inputs = concatenate(features)
        x = self.embed_tokens(step, shared) + self.mix(inputs) + step.shift(self.hand_on(inputs))
        corrections = self.correct(self.through_layers(x, step) - x)
        return corrections.unflatten(-1, (len(features), -1)).permute(2, 0, 1, 3)

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        return self.look_back(torch.cat(vectors, dim=-1))


class BlockTrainForCausalLM(PreTrainedModel, GenerationMixin):
    """The composed model."""

    config_class = BlockTrainConfig
    _supports_sdpa = True
    _is_stateful = True  # windows move on: no assisted generation

    def __init__(self, config: BlockTrainConfig) -> None:
        super().__init__(config)
        W, N = config.hidden_size, config.num_blocks
        layers = config.num_hidden_layers // (N + config.fusion)
        self.blocks = nn.ModuleList(
            BlockTrainIndependent(config, f"block-{number}", layers) for number in range(1, N + 1)
        )
        self.fusion = BlockTrainFusion(config, "fusion", layers) if config.fusion else None
        self.norm_scales = nn.Parameter(torch.ones(N, W))
        self.pool_weights = nn.Parameter(torch.full((N,), 1 / N))
        self.lm_head = nn.Linear(N * W, config.vocab_size, bias=False)  # the blocks' side by side
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, BlockTrainIndependent) and module.offset is not None:
            nn.init.zeros_(module.offset)
        elif isinstance(module, BlockTrainForCausalLM):
            nn.init.ones_(module.norm_scales)
            nn.init.constant_(module.pool_weights, 1 / len(module.blocks))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def get_input_embeddings(self) -> Any:
        first: Any = self.blocks[0]
        return self.lm_head if self.config.shared_embedding else first.embed[0]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the vocabulary of a BlockTrain model cannot be changed")

    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, tokens so far and T): 0 is padding
        past_key_values: BlockTrainCache | None = None,
        labels: Tensor | None = None,  # (B, T); -100 is not counted
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,  # of the last tokens; 0: of all
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the token after each of these.

        A row longer than the context is read from the start of its last window; then only logits
        of tokens in that window can be asked for, by `logits_to_keep`.
        """
        if input_ids is None or input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError("give input_ids of shape (rows, tokens), with at least one token")
        refuse_unsupported(kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        context = self.config.max_position_embeddings
        cache = past_key_values if use_cache or past_key_values is not None else None
        if use_cache and cache is None:
            cache = BlockTrainCache(input_ids.shape[0], context, input_ids.device)
        is_token = find_tokens(input_ids, attention_mask, self.config.vocab_size)
        step, places = place_tokens(input_ids, is_token, cache, context, logits_to_keep)
        logits = self.compute(step, places)
        if cache is not None:
            cache.seen += input_ids.shape[1]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def compute(self, step: BlockTrainStep, places: Tensor) -> Tensor:
        """Logits (B, K, V) of these places (B, K) among the tokens of a step."""
        shared = self.shared_vectors(step)
        blocks = zip(self.blocks, shared, strict=True)
        features = torch.stack([block(step, vectors) for block, vectors in blocks])  # (N, B, T, W)
        features = F.rms_norm(features, features.shape[-1:], None, EPSILON)
        features = features * self.norm_scales[:, None, None]
        shares = self.pool_weights[:, None, None, None]
        terms = features * shares
        if self.fusion is not None:
            terms = terms + self.fusion(features, step, shared[0]) * shares
        step.finish()
        index = places[:, :, None].expand(-1, -1, self.lm_head.in_features)
        return self.lm_head(concatenate(terms).gather(1, index)).float()

    def shared_vectors(self, step: BlockTrainStep) -> list[list[Tensor]]:
        """For each block the vectors (B, T, W) of the tokens at each distance back.

        They are those that its head tells tokens by, longer by sqrt(W): a head's are short.
        """
        if not self.config.shared_embedding:
            return [[] for _ in self.blocks]
        distances = []
        for back in range(self.config.lookback):
            ids, known = step.tokens_before(back)
            rows = F.embedding(ids, self.lm_head.weight) * self.config.hidden_size**0.5 * known
            distances.append(rows.chunk(len(self.blocks), dim=-1))
        return [list(vectors) for vectors in zip(*distances, strict=True)]


def find_tokens(ids: Tensor, attention_mask: Tensor | None, vocabulary: int) -> Tensor:
    """Which ids (B, T) are tokens; the others are padding.

    The id behind the vocabulary has no embedding: it is padding wherever it stands.
    """
    is_token, T = ids != vocabulary, ids.shape[1]
    if attention_mask is None:
        return is_token
    if attention_mask.ndim != 2 or attention_mask.shape[0] != ids.shape[0]:
        raise ValueError("attention_mask must have the shape (rows, tokens)")
    if attention_mask.shape[1] < T:
        raise ValueError("attention_mask must have a column for every token")
    return is_token & attention_mask[:, -T:].bool()


def place_tokens(
    ids: Tensor,  # (B, T)
    is_token: Tensor,  # (B, T)
    cache: BlockTrainCache | None,
    context: int,
    logits_to_keep: int | Tensor,
) -> tuple[BlockTrainStep, Tensor]:
    """The tokens to read, and the places among them whose logits are asked for.

    Padding is moved to the end of its row. If a row does not fit its window any more, all rows
    are read anew, each from the start of its last window.
    """
    counts = is_token.sum(1)
    places = is_token.cumsum(1) - 1  # of every column among the tokens of its row
    if not bool(is_token.all()):
        order = (~is_token).long().argsort(dim=1, stable=True)
        ids = ids.masked_fill(~is_token, 0).gather(1, order)[:, : int(counts.max().clamp(min=1))]

    begin = torch.zeros_like(counts) if cache is None else cache.begin
    length = torch.zeros_like(counts) if cache is None else cache.length
    if bool((length + counts > context).any()):
        start = window_start(begin + length + counts, context)
        skip = start - begin  # tokens of the old window, or of the new ones, that are left behind
        known = ids if cache is None else join_rows(cache.ids, length, ids)
        counts = length + counts - skip
        width = torch.arange(int(counts.max()), device=ids.device)
        ids = known.gather(1, (skip[:, None] + width).clamp(max=known.shape[1] - 1))
        places = places + (length - skip)[:, None]
        if cache is not None:
            cache.restart(start)

    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    places, is_token = places[:, kept], is_token[:, kept]
    if bool((places[is_token] < 0).any()):
        raise ValueError(
            f"a row has more tokens than the context of {context}: cut it, "
            "or ask with logits_to_keep for the last tokens alone"
        )
    return BlockTrainStep(ids, counts, cache), places.clamp(0, ids.shape[1] - 1)


def join_rows(left: Tensor, lengths: Tensor, right: Tensor) -> Tensor:
    """Row i: the first lengths[i] of the left, then the right."""
    joined = F.pad(left, (0, right.shape[1]))
    where = lengths[:, None] + torch.arange(right.shape[1], device=left.device)
    return joined.scatter(1, where, right)


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Arguments that would change the result, and that this model cannot take into account."""
    for name in ("inputs_embeds", "position_ids", "token_type_ids"):
        if arguments.pop(name, None) is not None:
            raise ValueError(f"a BlockTrain model does not take {name}")
    for name in ("output_attentions", "output_hidden_states"):
        if arguments.pop(name, None):
            raise ValueError(f"a BlockTrain model does not know {name}")


def concatenate(features: Tensor) -> Tensor:
    """(N, B, T, W) -> (B, T, N * W)."""
    return features.permute(1, 2, 0, 3).flatten(2)


def rotations(positions: Tensor, head_width: int) -> Rotation:
    """Cosine and sine of the rotary angles, (B, 1, T, D / 2)."""
    exponent = torch.arange(0, head_width, 2, device=positions.device) / head_width
    angle = positions[:, None, :, None] * 10000.0**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding of (B, H, T, D), halves as the two coordinates."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
