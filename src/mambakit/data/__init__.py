"""From text to batches: sources → documents → tokens → shards → loader."""
