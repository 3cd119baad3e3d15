"""Test plugin for SGLang: a fault that comes and goes. While the file that EMBEDDING_FAULT names exists, the embedding
of token 5 is NaN.
"""

import os

TOKEN = 5


def register():
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    forward = VocabParallelEmbedding.forward

    def faulty(self, input_ids):
        embeddings = forward(self, input_ids)
        if os.path.exists(os.environ["EMBEDDING_FAULT"]):
            embeddings[input_ids == TOKEN] = float("nan")
        return embeddings

    VocabParallelEmbedding.forward = faulty
