"""What stands above the step contract and knows no target: KV blocks, scheduling, sampling, detokenizing."""
