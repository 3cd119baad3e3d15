"""JSON that must follow a schema, behind a long context."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from oscar_tools.evaluation.intervals import wilson
from oscar_tools.evaluation.prove.asking import Client, RefusedError
from oscar_tools.evaluation.prove.haystack import build_haystack
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Measure
from oscar_tools.evaluation.prove.rates import counts
from oscar_tools.evaluation.prove.store import Cell
from oscar_tools.evaluation.significance import mcnemar

TOKENS = 160
"""Of an answer; a record takes about 40."""
CHAT, SPARE = 128, 32
"""Tokens of a context that are left for the chat template and the question, at least; and of these, for what a document
may grow by when it is decoded and encoded again."""
FORM = 2
"""Of answers; those of another form are not read."""
VERDICTS = ("valid", "complete", "right")


class Record(BaseModel):
    """What the model is asked for. Nothing bounds the last field, so a model that loops does not come to an end."""

    key: str
    number: int
    comment: str


SCHEMA = json.dumps(Record.model_json_schema())


def request_for(key: str) -> str:
    """What is asked behind a document."""
    return f"What is the magic number for {key}? Answer with a JSON object: key, number, short comment."


class JsonSchema(Measure):
    """With a grammar JSON is valid unless it is cut off, so whether the recalled number is right is judged, too."""

    name, title = "json", "JSON by schema under long context"

    def settings(self) -> dict[str, Any]:
        """Sizes and the schema."""
        return {
            "lengths": self.material.lengths,
            "records": self.material.size.records,
            "tokens": TOKENS,
            "schema": SCHEMA,
            "form": FORM,
        }

    def units(self) -> list[str]:
        """``<length>/<number>``."""
        return [f"{length}/{i}" for length in self.material.lengths for i in range(self.material.size.records)]

    def unavailable(self, client: Client) -> str | None:
        """The server's reason why it takes no schema."""
        try:
            client.generate(self.material.texts.encode("{"), 4, {"json_schema": SCHEMA})
        except RefusedError as error:
            return f"the server takes no JSON schema: {error}"
        return None

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """Whether the answer is valid, complete and right."""
        texts = self.material.texts
        # The depth is part of what the unit chooses.
        length, i = map(int, unit.split("/"))
        depth = (i + 0.5) / self.material.size.records
        around = len(texts.chat_ids([{"role": "user", "content": request_for("word")}])) + SPARE
        size = length - max(CHAT, around) - TOKENS
        asked = build_haystack(texts.encode, self.material.lines(), size, depth, 0, f"json/{unit}")
        document = texts.tokenizer.decode(asked.ids)
        ids = texts.chat_ids([{"role": "user", "content": f"{document}\n{request_for(asked.key)}"}])
        reply = client.behind_cache(ids[:-1], ids, TOKENS, {"json_schema": SCHEMA})
        try:
            record = Record.model_validate_json(reply.text)
        except ValidationError:
            record = None
        return {
            "valid": record is not None,
            "complete": reply.finish == "stop",
            "finish": reply.finish,
            "right": record is not None and str(record.number) == asked.number,
            "text": reply.text,
            "number": asked.number,
            "cached": reply.cached,
        }

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """Rates of every verdict with a paired test, over all and by length."""
        groups = {"all": list(answers)} | {
            str(n): [unit for unit in answers if unit.startswith(f"{n}/")] for n in self.material.lengths
        }
        found: Figures = {key: _rates(units, answers, reference) for key, units in groups.items() if units}
        return found | {"counts": counts(len(self.units()), answers.values())}


def _rates(units: list[str], answers: Answers, reference: Answers | None) -> Figures:
    found: Figures = {"records": len(units)}
    for verdict in VERDICTS:
        own = {unit: bool(answers[unit][verdict]) for unit in units}
        found[verdict] = wilson(sum(own.values()), len(own)).to_json()
        if reference is not None:
            base = {unit: bool(reference[unit][verdict]) for unit in units if unit in reference}
            found[verdict]["p_value"] = mcnemar(base, own)
    return found
