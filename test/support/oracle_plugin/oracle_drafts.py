"""Test plugin for SGLang: the algorithm ORACLE, whose drafts are right or wrong by plan.

It is NGRAM with a corpus of recorded texts, in the file that ORACLE_TEXTS names: a JSON list of lists of token ids. The
continuation of a text is known, so a draft is right as often as the plan wants it, and in the place in the tree that it
wants. The plan of a step follows from the length of the text and nothing else, so a repeated run drafts alike.
"""

from __future__ import annotations

import json
import os
import random

import numpy as np

VOCABULARY = 2048


def chain(rng, right, tokens):
    """Some right drafts, then wrong ones, one behind the other."""
    accepted = rng.randrange(tokens)
    drafts = [right[i] if i < accepted else (right[i] + 1 + rng.randrange(9)) % VOCABULARY for i in range(tokens - 1)]
    return drafts, list(range(tokens - 1))


def second_sibling(rng, right, tokens):
    """A wrong branch from the root, and behind it the right one."""
    wrong = rng.randrange(1, tokens - 1)
    drafts = [(right[i] + 1 + rng.randrange(9)) % VOCABULARY for i in range(wrong)]
    parents = list(range(wrong))
    accepted = rng.randrange(1, tokens - wrong)
    for i in range(tokens - 1 - wrong):
        drafts.append(right[i] if i < accepted else (right[i] + 1) % VOCABULARY)
        parents.append(0 if i == 0 else wrong + i)
    return drafts, parents


def between(rng, right, tokens):
    """Right and wrong drafts by turns, so that what is accepted lies scattered."""
    drafts, parents, last = [], [], 0
    for i in range(tokens - 1):
        if i % 2 == 0:
            drafts.append((right[i // 2] + 1 + rng.randrange(9)) % VOCABULARY)
            parents.append(last)
        else:
            drafts.append(right[i // 2])
            parents.append(last)
            last = i + 1
    return drafts, parents


def padded(rng, right, tokens):
    """A short chain; what is left hangs off the root, as NGRAM pads its drafts."""
    real = rng.randrange(tokens)
    drafts = [right[i] if i < real else 0 for i in range(tokens - 1)]
    return drafts, [i if i < real else 0 for i in range(tokens - 1)]


PLANS = {"mixed": (chain, second_sibling, between, padded), "chains": (chain,), "wrong": (), "right": ()}


class Corpus:
    """Stands in for SGLang's corpus of n-grams."""

    def __init__(self, draft_token_num, **_):
        self.tokens = draft_token_num
        self.plan = os.environ.get("ORACLE_PLAN", "mixed")
        with open(os.environ["ORACLE_TEXTS"]) as file:
            self.texts = json.load(file)

    def batch_get(self, req_ids, texts, lengths):
        drafts, masks = zip(*(self.draft(text) for text in texts), strict=True)
        return np.concatenate(drafts), np.concatenate(masks)

    def draft(self, text):
        tokens, text = self.tokens, list(text)
        known = next((one for one in self.texts if one[: len(text)] == text), None)
        right = [] if known is None else known[len(text) : len(text) + tokens]
        rng = random.Random(len(text))
        right = right + [rng.randrange(VOCABULARY) for _ in range(tokens - len(right))]
        if plans := PLANS[self.plan]:
            drafts, parents = rng.choice(plans)(rng, right, tokens)
        else:
            offset = self.plan == "wrong"
            drafts, parents = [(one + offset) % VOCABULARY for one in right[: tokens - 1]], list(range(tokens - 1))
        mask = np.zeros((tokens, tokens), dtype=np.int64)
        mask[0, 0] = 1
        for node, parent in enumerate(parents, start=1):
            mask[node] = mask[parent]
            mask[node, node] = 1
        return np.array([text[-1], *drafts], dtype=np.int64), mask.flatten()

    def batch_put(self, texts):
        pass

    def synchronize(self):
        pass

    def reset(self):
        pass

    def erase_match_state(self, req_ids):
        pass


def register():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Oracle(CustomSpecAlgo):
        def is_ngram(self):
            return True

        def __getattr__(self, name):
            """What SGLang's record of an algorithm lacks is as with NGRAM."""
            return getattr(SpeculativeAlgorithm.NGRAM, name)

        def has_draft_kv(self):
            return False

        def handle_server_args(self, server_args):
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            _handle_ngram(server_args)

    @SpeculativeAlgorithm.register("ORACLE", supports_overlap=True, spec_class=Oracle)
    def worker(server_args):
        from sglang.srt.speculative import ngram_worker

        ngram_worker.NgramCorpus = Corpus
        return ngram_worker.NGRAMWorker
