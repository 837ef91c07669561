"""The table of leaks tells a pack that mixes its documents from one that does not."""

from benchmarks.leaks import errors, table


def test_plain_transformers_mixes_the_documents_of_a_convolution_and_not_those_of_attention():
    contestants = ["transformers", "ours"]
    found = {kind: errors(kind, contestants) for kind in ("lfm2", "qwen3")}
    assert found["lfm2"]["transformers"] > 0.1
    assert max(found["qwen3"]["transformers"], *(of_kind["ours"] for of_kind in found.values())) < 1e-5
    assert [line.split()[0] for line in table(found, contestants).splitlines()[1:]] == ["lfm2", "qwen3"]
