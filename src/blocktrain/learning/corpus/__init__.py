"""Text of any size and kind becomes shards of token ids; a prepared corpus is read from them."""
