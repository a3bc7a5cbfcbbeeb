"""Log probabilities of a chosen token and its likeliest rivals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plugins.generation import TokenLogprob
from plugins.sampling import candidates


def token_logprob(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprob:
    """Natural logarithms of the softmax of ``logits`` [vocab], before temperature, top-k and top-p."""
    highest = logits.max()
    log_total = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    top_ids = candidates.top_k(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
    top_ids = top_ids[np.lexsort((top_ids, -logits[top_ids]))]
    top = tuple((int(top_id), float(logits[top_id]) - log_total) for top_id in top_ids)
    return TokenLogprob(token_id, float(logits[token_id]) - log_total, top)
