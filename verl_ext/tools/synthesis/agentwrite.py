"""AgentWrite: planned long texts (LongWriter, arXiv 2408.07055, section 3).

    instruction                               →  plan: a paragraph's main point and words on each line
    instruction, plan, text so far, its line  →  the next paragraph, and so on       sequential
    instruction, plan, its line               →  each paragraph, all at once         parallel (Table 2 of the paper)

The instruction states the requested length. A text is kept if its length is near that, by default if S_l is 80 or more:
ModelScope reports that the 666 of 6,000 records that pass this filter do as well as all (arXiv 2410.10210).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from verl_ext.options import must, option
from verl_ext.tables import aligned
from verl_ext.tools.endpoint.answer import UNPARSABLE, Answer, Unparsable, Usage
from verl_ext.tools.endpoint.client import EndpointOptions, all_of
from verl_ext.tools.synthesis.corpus import Intervals, Lengths
from verl_ext.tools.synthesis.estimate import PARAGRAPH, PROMPT, TOKENS_A_WORD
from verl_ext.tools.synthesis.items import SourceItem, drawn, first_request, item_of, language_in
from verl_ext.tools.synthesis.lengths import asked_range, mentions_length, range_score
from verl_ext.tools.synthesis.options import SynthesizeOptions, ascending_problem
from verl_ext.tools.synthesis.overlap import SHINGLE, runs_of_words
from verl_ext.tools.synthesis.plans import cleaned_paragraph, parse_plan, planned_words
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.replies import yes_or_no
from verl_ext.tools.synthesis.report import Result
from verl_ext.tools.synthesis.scorers import ScorerOptions, scorer_of
from verl_ext.tools.synthesis.task import NoRecord, SynthesisTask, attempted, usable
from verl_ext.tools.word_count import count_words, language_of

FORMS = ("sequential", "parallel")
# What is asked of an instruction from real logs (LongWriter, 3.2), and the outcome of an answer that leaves it out.
_SELECTED = {"harmful": "harmful|有害", "scraping": "scraping|抓取", "long": "long|长文"}
_LEFT_OUT = {"harmful": ("toxic", True), "scraping": ("scraping", True), "long": ("not_long", False)}


@dataclass(frozen=True)
class AgentWriteOptions(SynthesizeOptions):
    """Long texts, planned and written paragraph by paragraph."""

    lengths: list[Any] = option([], "lengths in words, one of which is drawn if an instruction names none")
    min_length_score: float = option(80.0, "minimum S_l, 0 to 100, of a text that is kept", least=0, most=100)
    select: int | None = option(
        None,
        "a model leaves out instructions that are harmful or made to scrape data, or whose good answer has"
        " at most so many words (LongWriter: 2000); null: none",
        least=1,
    )
    languages: list[str] = option([], "languages of the instructions that are used, of en, zh; empty: all")
    paragraphs: str = option(
        "sequential",
        "sequential: each paragraph continues the text so far | parallel: each is written from the plan"
        " alone, all at once | both: the report compares them, and the records are sequential",
        choices=(*FORMS, "both"),
    )
    word_intervals: list[Any] = option(
        [],
        "edges of intervals of lengths in words, e.g. [2000,4000,6000,8000,10000], over which the lengths"
        " asked for and written are spread evenly",
    )
    max_paragraphs: int = option(50, "maximum number of paragraphs of a plan", least=1)
    scorer: ScorerOptions = option(ScorerOptions, "with paragraphs=both: kind=writing scores both")
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")

    def task_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the server, the lengths and the scorer."""
        yield from super().task_problems()
        if self.scorer.kind is not None:
            yield from self.scorer.kind_problems()
            if self.scorer.kind != "writing" or self.paragraphs != "both":
                got = f"{self.scorer.kind} with paragraphs={self.paragraphs}"
                yield must("scorer.kind", "be null or, with paragraphs=both, writing", got)
        if self.word_intervals and self.lengths:
            yield must("lengths", "be empty with word_intervals, from which lengths are drawn", self.lengths)
        yield ascending_problem("lengths", self.lengths, 0)
        yield ascending_problem("word_intervals", self.word_intervals, 2 if self.word_intervals else 0)

    @property
    def servers(self) -> list[EndpointOptions]:
        """The servers that are asked, the judge's too."""
        return [*super().servers, *self.scorer.servers]

    @property
    def forms(self) -> Sequence[str]:
        """The forms in which each text is written."""
        return FORMS if self.paragraphs == "both" else (self.paragraphs,)


class AgentWrite(SynthesisTask):
    """A writer of the texts of a run, which keeps the figures of its report.

    Attributes:
        figures: the figures of each item's text in each form, by the names of the report.
        written: the number of texts by interval of words.
    """

    name: ClassVar[str] = "agentwrite"
    options_class: ClassVar[type[SynthesizeOptions]] = AgentWriteOptions
    options: AgentWriteOptions

    def __init__(self, options: AgentWriteOptions) -> None:
        super().__init__(options)
        self.figures: dict[tuple[str, str], dict[str, float]] = {}
        self.written: Counter[str] = Counter()
        self.scorer = scorer_of(options.scorer, self) if options.scorer.kind else None
        if options.word_intervals:
            self.lengths = Lengths(Intervals(tuple(options.word_intervals)), self._count_wanted)

    def read(self, record: Mapping[str, Any], name: str, source: str) -> SourceItem | None:
        """Return a record's instruction, which may be the first user's turn of a chat."""
        text = record.get(self.text_key)
        if not isinstance(text, str):
            text = first_request(record) or text
        item = item_of(record, text, self.text_key, name, source)
        languages = self.options.languages
        return None if languages and language_in(record, item.text) not in languages else item

    def wanted_words(self, text: str, name: str) -> tuple[int, int] | None:
        """Return the least and the greatest number of words that an instruction asks for.

        One that says nothing about length has a number drawn, if the options have lengths. Several lengths are None.
        """
        options = self.options
        asked, edges, lengths = asked_range(text), options.word_intervals, options.lengths
        if asked is not None:
            return asked
        if mentions_length(text) or not (edges or lengths):
            return None
        if edges:  # in hundreds of words, within an interval that is drawn too
            place = drawn(options.seed, text, "interval") % (len(edges) - 1)
            low, high = edges[place : place + 2]
            words = low + 100 * (drawn(options.seed, text, "length") % max((high - low) // 100, 1))
        else:
            words = lengths[drawn(options.seed, name, "length") % len(lengths)]
        return words, words

    def _count_wanted(self, text: str) -> int:
        """Return the words that an instruction asks for, the middle of a range; 0 for several lengths."""
        return sum(self.wanted_words(text, "") or (0,)) // 2

    def requests(self, item: SourceItem) -> Iterator[tuple[float, Usage]]:
        """Yield the requests for a selection, a plan and its paragraphs; a drawn length counts as the mean of them."""
        options = self.options
        instruction = round(len(item.text.split()) * TOKENS_A_WORD)
        wanted = self.wanted_words(item.text, item.name)
        if wanted is None:
            return  # it is left out
        words = sum(wanted) / 2
        if options.lengths and asked_range(item.text) is None:
            words = fmean(options.lengths)
        if options.select is not None:
            yield 1, Usage(instruction + 2 * PROMPT, 0, 20)
        paragraphs = max(round(words / PARAGRAPH), 1)
        plan, text = 30 * paragraphs, round(words * TOKENS_A_WORD)
        yield 1, Usage(instruction + PROMPT, 0, plan)
        for form in options.forms:
            before = text * (paragraphs - 1) // (2 * paragraphs) if form == "sequential" else 0  # of the text so far
            yield paragraphs, Usage(instruction + PROMPT + plan + before, 0, text // paragraphs)

    async def make(self, item: SourceItem) -> Result:
        """Return an instruction's record; raise NoRecord if it has none."""
        options, own = self.options, self.prompts[language_of(item.text)]
        # Without a length there is nothing to measure a text by, so one is added or the item is left out.
        instruction, wanted = item.text, self.wanted_words(item.text, item.name)
        if wanted is None:
            raise NoRecord("no_length", "the instruction must ask for one number of words or one range")
        if asked_range(instruction) is None:
            instruction = own.filled("with_length", instruction=instruction, words=str(wanted[0]))
        answers = []
        if options.select is not None:
            content = own.filled("select", instruction=item.text, words=str(options.select))
            answer = await self.ask(item, "select", content, parse_selection)
            for name, (outcome, value) in _LEFT_OUT.items():
                if answer.parsed[name] is value:
                    raise NoRecord(outcome, f"the model says {name}: {'yes' if value else 'no'}")
            answers.append(answer)
        # The plan decides before its paragraphs are paid for: a wrong length or number of them ends here.
        plan = await self.ask(item, "plan", own.filled("plan", instruction=instruction), parse_plan)
        steps = plan.parsed
        if len(steps) > options.max_paragraphs:
            got = f"the plan has {len(steps)} paragraphs, more than max_paragraphs={options.max_paragraphs}"
            raise NoRecord("plan_too_long", got)
        planned = planned_words(steps)
        if (score := range_score(wanted, planned)) < options.min_length_score:
            got = f"the plan has {planned:,.0f} words where {_spelled(wanted)} are asked for: S_l {score:.1f}"
            raise NoRecord("length_score", got)
        given = item, own, instruction, wanted, steps, [*answers, plan]
        results = [await attempted(self._written(form, *given)) for form in options.forms]
        return results[0]

    async def _written(
        self,
        form: str,
        item: SourceItem,
        own: PromptTexts,
        instruction: str,
        wanted: tuple[int, int],
        steps: Sequence[str],
        answers: Sequence[Answer],
    ) -> Result:
        """Write the paragraphs of a plan in one form; return the record. answers: those before the paragraphs."""

        async def paragraph(number: int, text: str | None) -> Answer:
            name, stage = ("write", "write") if text is not None else ("write_alone", "alone")
            values = {"instruction": instruction, "plan": "\n".join(steps), "step": steps[number - 1]}
            return await self.answer(item, f"{stage}/{number}", own.filled(name, text=text or "", **values))

        # A paragraph that continues the text so far waits for it; those of the plan alone are asked for at once.
        numbers = range(1, len(steps) + 1)
        at_once = await all_of([paragraph(number, None) for number in numbers]) if form == "parallel" else []
        paragraphs, answers = list[str](), list(answers)
        for number in numbers:
            answer = at_once[number - 1] if at_once else await paragraph(number, "\n\n".join(paragraphs))
            called = f"paragraph {number} of {len(steps)}"
            if not (cleaned := cleaned_paragraph(usable(answer, called).text)):
                raise NoRecord(UNPARSABLE, f"{called} is empty")
            answers.append(answer)
            paragraphs.append(cleaned)
        # The finished text is measured again, because models keep to a plan's lengths only roughly.
        text = "\n\n".join(paragraphs)
        words = count_words(text)
        score = range_score(wanted, words)
        figures = {"words": words, "S_l": score, "repeated": 100 * repeated_share(paragraphs)}
        self.figures[item.name, form] = figures
        if self.scorer is not None:
            judged = await self.scorer.score(item.name, [{"role": "user", "content": instruction}], text)
            figures |= {"score": judged.parsed} if judged.is_done else {}
        if score < self.options.min_length_score:
            got = f"{words:,} words where {_spelled(wanted)} were asked for: S_l {score:.1f}"
            raise NoRecord("length_score", got)
        self.check_passages(text, "the text")
        facts = {
            "words_asked": wanted[0] if wanted[0] == wanted[1] else list(wanted),
            "words_written": words,
            "length_score": round(score, 1),
            "paragraphs": len(steps),
        }
        return self.record_of(item, self.name, instruction, text, own, answers, facts)

    def take(self, result: Result) -> Result:
        """Leave out a text of an interval that has as many as were asked for in it."""
        if self.lengths is None or not result.records:
            return result
        intervals, words = self.lengths.intervals, result.records[0]["provenance"]["words_written"]
        name = intervals.of(words)
        if name is None or self.written[name] >= len(self.corpus.chosen[name]):
            outcome = "outside_intervals" if name is None else "interval_full"
            return Result(outcome, reason=f"the text has {words:,} words, word_intervals {list(intervals.edges)}")
        self.written[name] += 1
        return result

    def finish(self) -> None:
        """Report the lengths that were written, and the means of both forms."""
        if self.lengths is not None:
            chosen, found = self.corpus.chosen, self.corpus.available
            self.outcomes.lengths = {
                f"{name} words": {"found": found[name], "drawn": len(chosen[name]), "written": self.written[name]}
                for name in self.lengths.intervals.names
            }
        if self.options.paragraphs == "both":
            self.outcomes.facts["forms"] = report = self._means()
            rows = [
                {"form": form, **{name: f"{value:,.6g}" for name, value in of.items()}} for form, of in report.items()
            ]
            self.outcomes.notes.append(aligned(rows, ["form"]))

    def _means(self) -> dict[str, dict[str, float]]:
        """Return the means of the figures of each form, over the items that have a text of both."""
        items = [name for name, form in sorted(self.figures) if form == FORMS[1] and (name, FORMS[0]) in self.figures]
        report = {}
        for form in FORMS:
            figures = [self.figures[item, form] for item in items]
            report[form] = {"texts": float(len(items))}
            for name in ("words", "S_l", "repeated", "score"):
                values = [each[name] for each in figures if name in each]
                report[form] |= {name: round(fmean(values), 2)} if values else {}
        return report


def parse_selection(text: str) -> dict[str, bool]:
    """Return whether an instruction is harmful, scraping and long; raise Unparsable if one is missing."""
    found = {}
    for name, label in _SELECTED.items():
        answers = yes_or_no(label, text)
        if not answers:
            raise Unparsable(f"the answer has no line of the form `{name.capitalize()}: no`")
        found[name] = answers[0]
    return found


def repeated_share(paragraphs: Sequence[str]) -> float:
    """Return the share of runs of 5 words that an earlier paragraph has too."""
    earlier, repeated, total = set[str](), 0, 0
    for paragraph in paragraphs:
        runs = set(runs_of_words(paragraph, SHINGLE))
        repeated, total = repeated + len(runs & earlier), total + len(runs)
        earlier |= runs
    return repeated / total if total else 0.0


def _spelled(wanted: tuple[int, int]) -> str:
    return f"{wanted[0]:,}" if wanted[0] == wanted[1] else f"{wanted[0]:,} to {wanted[1]:,}"
