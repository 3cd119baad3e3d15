"""Accuracy of a served model on public benchmarks, through a maintained harness and the OpenAI endpoint.

The harness is EvalScope: of the maintained ones it alone has GPQA-Diamond, HumanEval, LiveCodeBench, AIME 2025 and
MATH-500 as they are published, talks to an OpenAI endpoint, reads data sets from the hub or from a folder, and resumes
from its own predictions. (lm-eval has no LiveCodeBench, sgl-eval neither HumanEval nor LiveCodeBench, lighteval no
resumption within a task.) It runs in a process of its own, so it may live in an environment of its own, and it is an
optional extra.
"""
