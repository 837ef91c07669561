"""Tools: looking, planning, making data and models, judging. The core never imports them."""
