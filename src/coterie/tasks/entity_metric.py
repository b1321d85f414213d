"""Entity precision, recall and F1 over words, counted as seqeval does, sentence by sentence.

Own counting keeps scikit-learn (a dependency of seqeval) out of a training process; tests hold it equal to seqeval.
Where a figure would divide by zero it is 0.
"""

from collections import Counter
from collections.abc import Sequence

from coterie.tasks.tag_schemes import find_entities


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _scores(correct: int, predicted: int, gold: int) -> tuple[float, float, float]:
    """Precision, recall, F1."""
    return _ratio(correct, predicted), _ratio(correct, gold), _ratio(2 * correct, predicted + gold)


class EntityCounts:
    """Counts of correct, predicted and gold entities per type, and of correctly tagged words."""

    def __init__(self) -> None:
        self._correct: Counter[str] = Counter()
        self._predicted: Counter[str] = Counter()
        self._gold: Counter[str] = Counter()
        self._words = 0
        self._correct_words = 0

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        """Count one sentence: a tag per word, both of equal length."""
        assert len(gold) == len(predicted), f"{len(gold)} gold tags but {len(predicted)} predicted"
        gold_entities, predicted_entities = set(find_entities(gold)), set(find_entities(predicted))
        self._gold.update(entity.type for entity in gold_entities)
        self._predicted.update(entity.type for entity in predicted_entities)
        self._correct.update(entity.type for entity in gold_entities & predicted_entities)
        self._words += len(gold)
        self._correct_words += sum(one == other for one, other in zip(gold, predicted, strict=True))

    def _types(self) -> list[str]:
        return sorted(self._gold.keys() | self._predicted.keys())

    def _scores_of(self, entity_type: str) -> tuple[float, float, float]:
        return _scores(self._correct[entity_type], self._predicted[entity_type], self._gold[entity_type])

    def _micro(self) -> tuple[float, float, float]:
        return _scores(self._correct.total(), self._predicted.total(), self._gold.total())

    def result(self) -> dict[str, float]:
        """All figures, shares between 0 and 1: over all entities, per type, and the accuracy over words."""
        precision, recall, f1 = self._micro()
        figures = {
            "entity_f1": f1,
            "entity_precision": precision,
            "entity_recall": recall,
            "entities_gold": float(self._gold.total()),
            "entities_predicted": float(self._predicted.total()),
            "entities_correct": float(self._correct.total()),
            "word_accuracy": _ratio(self._correct_words, self._words),
            "words": float(self._words),
        }
        for entity_type in self._types():
            precision, recall, f1 = self._scores_of(entity_type)
            figures |= {
                f"entity_f1/{entity_type}": f1,
                f"entity_precision/{entity_type}": precision,
                f"entity_recall/{entity_type}": recall,
                f"entities_gold/{entity_type}": float(self._gold[entity_type]),
            }
        return figures

    def report(self) -> str:
        """A table for people: per type, over all entities (micro), and the mean over types (macro), in percent."""
        types = self._types()

        def mean_of(column: int) -> float:
            return _ratio(sum(scores[column] for scores in per_type), len(types))

        per_type = [self._scores_of(entity_type) for entity_type in types]
        macro = (mean_of(0), mean_of(1), mean_of(2))
        total = self._gold.total()
        table = [(name, scores, self._gold[name]) for name, scores in zip(types, per_type, strict=True)]
        table += [("all (micro)", self._micro(), total), ("mean of types (macro)", macro, total)]
        width = max(len(name) for name, _, _ in table)
        lines = [f"{'entity type':<{width}}  precision  recall     F1  entities"]
        for name, (precision, recall, f1), count in table:
            lines.append(f"{name:<{width}}  {precision:>9.1%}  {recall:>6.1%}  {f1:>5.1%}  {count:>8}")
        lines.append(f"{self._correct_words} of {self._words} words tagged right")
        return "\n".join(lines)
