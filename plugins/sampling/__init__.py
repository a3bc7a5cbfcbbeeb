"""From logits to token ids, for a whole batch at once."""
