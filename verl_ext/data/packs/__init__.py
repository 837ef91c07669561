"""The packs of documents: their options, plan, facts and reports."""
