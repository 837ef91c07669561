"""Steps of the engine on two ranks, on packs of a few documents."""

from tests.lib.reference import documents_of_answers

DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [[DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[5]]]


def engine_steps(folders, ulysses, groups, overrides=()):
    """Take a step of each model, on ranks that share every pack."""
    from tests.lib.packed_engine import build_worker, token_step

    steps, context = {}, f"parallel.context_parallel_size={groups}"
    for name, folder in folders.items():
        engine = build_worker(folder, ulysses * groups if groups == 1 else ulysses, [context, *overrides]).engine
        steps[name] = token_step(engine, PACKS)
    return steps
