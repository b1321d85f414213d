"""Who runs what: cuts, device order and subset, memory, in-flight depth, codecs; and the sentences that explain it."""
