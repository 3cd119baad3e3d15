"""What SGLang's NGRAM worker takes from its kernel package, in torch."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees from their masks, in place.

    Args:
        tree_mask: bool [batch * tokens * tokens]; token i sees its ancestors and itself.
        seq_lens: [batch], tokens before the root.
        positions: [batch * tokens], written: a token's depth behind ``seq_lens``.
        retrive_index: [batch, tokens], written: index of each token in the batch.
        retrive_next_token: [batch, tokens], written: a token's first child, or -1.
        retrive_next_sibling: [batch, tokens], written: the next child of the same parent, or -1.
        batch_size, draft_token_num: sizes.
    """
    size = (batch_size, draft_token_num)
    ancestors = tree_mask.view(*size, draft_token_num).bool().tril(-1)
    positions.copy_((ancestors.sum(-1) + seq_lens.long()[:, None]).flatten())
    retrive_index.copy_(torch.arange(batch_size * draft_token_num).view(size))
    retrive_next_token.fill_(-1)
    retrive_next_sibling.fill_(-1)
    for request in range(batch_size):
        newest: dict[int, int] = {}  # child of every parent
        for token in range(1, draft_token_num):
            parents = ancestors[request, token].nonzero()
            if not len(parents):
                continue
            parent = int(parents.max())
            if parent in newest:
                retrive_next_sibling[request, newest[parent]] = token
            else:
                retrive_next_token[request, parent] = token
            newest[parent] = token
