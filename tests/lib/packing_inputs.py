"""Random lengths to pack, and a plain loop that packs them."""

from hypothesis import strategies as st


@st.composite
def packing_inputs(draw, min_size=0):
    max_tokens = draw(st.integers(1, 100))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=min_size, max_size=60))
    return lengths, max_tokens


def first_fit_decreasing_count(lengths, max_tokens):
    rooms = []
    for length in sorted(lengths, reverse=True):
        for pack, room in enumerate(rooms):
            if room >= length:
                rooms[pack] -= length
                break
        else:
            rooms.append(max_tokens - length)
    return len(rooms)
