"""Turn text into token ids, masks and documents."""
