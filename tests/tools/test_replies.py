"""What models write is read in the forms in which they write it: lengths, plans, paragraphs, questions, refusals."""

import json

import pytest

from verl_ext.tools.endpoint.answer import DONE, REFUSED, Answer, Unparsable
from verl_ext.tools.synthesis.glm_long import parse_pair
from verl_ext.tools.synthesis.lengths import asked_range, asked_words, mentions_length, range_score
from verl_ext.tools.synthesis.longalign import parse_questions
from verl_ext.tools.synthesis.plans import cleaned_paragraph, parse_plan, planned_words
from verl_ext.tools.synthesis.replies import refused_in_words

ONE_LENGTH = {
    2000: [
        *("Write a 2,000-word essay", "Write 2000 words", "a 2k word essay", "in 2,000+ words", "at least 2000 words"),
        *("2000 English words", "two thousand words", "a two-thousand-word story", "Word count: 2000.", "字数：2000"),
        *("写一篇2000字的文章", "写两千字", "不少于2000字", "约2000个汉字"),
        "Write 2000 words. The 2000 words must rhyme.",
    ],
    1500: ["1500 (fifteen hundred) word", "fifteen hundred words", "1.5k words", "一千五百字", "一千五字"],
    1050: ["写一千零五十字"],
    1000: ["a thousand words", "one thousand words"],
    15000: ["写一篇1.5万字的小说", "写一万五千字", "fifteen thousand words"],
}
OTHER_LENGTHS = [
    *("between 3000 and 4000 words", "1000 or 2000 words", "2000-3000 words", "2-3k words", "2500〜3000字"),
    *("写3000、4000字", "2000到3000字", "写两三千字", "From 2,000 words to 3,000 words"),
    "1000 words here, 2000 words there",
    *("two to three thousand words", "a few thousand words", "几千字", "hundreds of words"),
    *("five parts of 200 words each", "from 3000 up to 4000 words", "half a million words"),
    *("每段200字", "3 pages", "half a page", "no more than 500 characters", "length: 1500", "the year 1984 words"),
]
NO_LENGTH = [
    *("Write on tides.", "写一个关于名字的故事", "十字路口", "Explain the words of the king"),
    "Write a story of 3 ships",
]


def test_one_length_is_read_in_any_words_and_no_other_is_taken_for_one_or_for_none():
    for words, instructions in ONE_LENGTH.items():
        assert {text: asked_words(text) for text in instructions} == dict.fromkeys(instructions, words)
    assert {text: asked_words(text) for text in OTHER_LENGTHS} == dict.fromkeys(OTHER_LENGTHS)
    assert {text: mentions_length(text) for text in OTHER_LENGTHS} == dict.fromkeys(OTHER_LENGTHS, True)
    assert {(asked_words(text), mentions_length(text)) for text in NO_LENGTH} == {(None, False)}


RANGES = {
    (2000, 3000): [
        *("2000-3000 words", "2-3k words", "2000到3000字", "From 2,000 words to 3,000 words", "两到三千字"),
        *("two to three thousand words", "between 2000 and 3000 words", "2000〜3000字左右", "2,000 words"),
    ],
    (10000, 20000): ["1-2万字", "一万到两万字", "between ten and twenty thousand words"],
}
NO_RANGE = [
    *("1000 or 2000 words", "写3000、4000字", "写两三千字", "1000 words here, 2000 words there", "几千字"),
    *("2000 to 3000 words in parts of 200 words each", "each 200 to 300 words", "3000-2000 words"),
    "2000-3000 words, then 500 words",
]


def test_a_range_of_lengths_is_read_and_a_text_within_it_scores_100():
    for (low, high), instructions in RANGES.items():
        for text in instructions:
            assert asked_range(text) == ((low, low) if text == "2,000 words" else (low, high)), text
    assert {text: asked_range(text) for text in NO_RANGE} == dict.fromkeys(NO_RANGE)
    scores = {2000: 100, 2500: 100, 3000: 100, 6000: 200 / 3, 1000: 50, 0: 0}
    assert {words: range_score((2000, 3000), words) for words in scores} == pytest.approx(scores)


STEP = "Paragraph 1 - Main Point: the moon - Word Count: 200"
LABELS = [
    *(f"{STEP}\n\n", f"{STEP} ", f"{STEP} words\n", f"**{STEP.replace('1', '3')} words**\n\n", f"1. {STEP}\n"),
    *(
        "Paragraph 1 - Main Point: the moon\n\n",
        "Main Point: the moon - Word Count: 200\n",
        "段落1 - 要点：潮汐 - 字数：400\n",
    ),
    *(
        "Paragraph 1\nMain Point: the moon\nWord Count: 200\n\n",
        "Paragraph 1 (400 words):\n",
        "Paragraph 1 (Word Count: 4):\n",
    ),
    *("[Paragraph 1]\n", "[Paragraph 4]", "(Paragraph 1) ", "Paragraph 1. ", "Paragraph One: "),
    *("Paragraph Twenty-One: ", "### Paragraph 1:\n"),
    *("**Paragraph 1**\n", "**Paragraph 1:** ", "Paragraph 2 – ", "Section 3: ", "第一段：", "第 1 段\n", "第十二段："),
    "【第三段】",
    *("段落一：", "段落1：", "Here is the next paragraph:\n\n", "Sure! Here's paragraph 2:\n\nParagraph 2: "),
    "以下是下一段：\n",
]
TEXTS = [
    *("The tide rises. It falls.", "Paragraph 2 of the treaty says this.", "第一段时间很长。", "Section 3.2 says so."),
    *("Part one of the story ended: badly.", "## The sea\n\nIt rises.", "Here are three causes:\n- the moon"),
    "Here is the sea.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_only_what_is_no_text_is_removed_from_a_paragraph(text):
    assert cleaned_paragraph(text) == text
    for label in LABELS:
        assert cleaned_paragraph(label + text) == text, label
    assert cleaned_paragraph(f"{text}\n\n(Word count: 398 words)") == text


@pytest.mark.parametrize(
    "line",
    [
        *("Paragraph 1 - Main Point: a - Word Count: 400", "1. Paragraph 1 - Main Point: a - Word Count: 400 words"),
        *("**Paragraph 1** - Main Point: a - Word Count: 400", "Paragraph 1 - Main points: a, b - Word Count: 300-500"),
        *(
            "第一段 - 要点：a - 字数：400",
            "段落一 - 要点：a - 字数：400字",
            "Paragraph 1 - Main Point: a\n- Word Count: 400",
            "第一段 - 主要观点：a - 字数：400",
            "1. 段落1 - 主要内容：a - 字数要求：400字",
            "- Paragraph 1 - Key Idea: a - Estimated Word Count: 400",
        ),
        *("Paragraph 1\n- Main Point: a\n- Word Count: about 400", "Paragraph One: Main Point: a; Word Count: 400"),
    ],
)
def test_a_plan_is_read_line_by_line_with_its_sum_of_words(line):
    steps = parse_plan(f"# Plan\n{line}\n\nParagraph 2 - Main Point: b - Word Count: 1,200\nGood luck!")
    assert (len(steps), planned_words(steps)) == (2, 1600)
    assert not any("\n" in step for step in steps)


def test_questions_are_read_in_any_numbering_from_1():
    forms = ["{}: ", "{}. ", "{}) ", "({}) ", "[{}] ", "{} - ", "**{}:** ", "**{}.** ", "Q{}: ", "Question {}: "]
    forms += ["Question {}\n", "**Question {}**\n\n", "### Question {}: ", "（{}）", "问题{}：", "{}、"]
    for form in forms:
        text = "\n".join(form.format(number) + f"What is {number}?" for number in range(1, 6))
        expected = [f"What is {number}?" for number in range(1, 6)]
        assert parse_questions(f"In 2019. Here they are.\n\n{text}\n\nI hope these help.") == expected, form
    assert parse_questions("一、甲？\n二、乙？") == ["甲？", "乙？"]
    for reply in (["A?", "B?"], {"questions": [{"question": "A?"}, {"question": "B?"}]}, {"1": "A?", "2": "B?"}):
        assert parse_questions(json.dumps(reply)) == ["A?", "B?"]
        assert parse_questions(f"Here:\n```json\n{json.dumps(reply)}\n```") == ["A?", "B?"]
    lines = 'In the text,\n"2: the law" is cited. Why?'
    assert parse_questions(f"1999. The book says:\n1: {lines}\n2: B?") == [lines, "B?"]
    for reply in ("nothing", "1:\n2:", "1999. The book", "2: B?"):
        with pytest.raises(Unparsable):
            parse_questions(reply)


@pytest.mark.parametrize(
    "reply",
    [
        *("Question: A?\nAnswer: B", "Question: A? Answer: B", "Question 1: A?\nAnswer 1: B", "Q: A?\nA: B"),
        *("### Question\nA?\n### Answer\nB", "**Question:** A?\n\n**Answer:** B", "问：A?\n答：B", "问题：A？答案：B"),
        *('{"question": "A?", "answer": "B"}', "Question: A?\nAnswer: B\n\nQuestion: C?\nAnswer: D"),
        "Question 1: A?\nAnswer 1: B\nQuestion 2: C?\nAnswer 2: D",
    ],
)
def test_the_first_question_and_its_answer_are_read(reply):
    question, answer = parse_pair(reply)
    assert (question.replace("？", "?"), answer) == ("A?", "B")


@pytest.mark.parametrize("reply", ["", "A? B", "Question: A?", "Answer: B"])
def test_a_reply_without_question_and_answer_cannot_be_read(reply):
    with pytest.raises(Unparsable):
        parse_pair(reply)


def test_a_refusal_in_words_is_no_answer():
    refusals = [
        *(
            "I'm sorry, but I can't assist with that request.",
            "I cannot help with that.",
            "I'm unable to assist with it.",
        ),
        *("As an AI language model, I cannot provide this.", "I apologize, but I am unable to write this."),
        *("Sorry, I won’t continue.", "抱歉，我无法协助完成这个请求。", "对不起，我不能提供。"),
        "作为一个人工智能，我无法回答。",
    ]
    answers = [
        *("I'm sorry to say that it fell.", "I cannot find it in the text.", "无法预测的是潮汐。"),
        f"{refusals[0]} {'x ' * 400}",
    ]
    for text in refusals:
        assert refused_in_words(Answer(DONE, text)).outcome == REFUSED, text
    for text in answers:
        assert refused_in_words(Answer(DONE, text)).outcome == DONE, text
