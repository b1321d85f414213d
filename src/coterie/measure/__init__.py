"""Takes the profiles that a plan is made from: memory that may be used, what units cost, how fast a device is.

Modules that need no torch import none: `keys`, `budget`, `process_memory` and `allocator` start in milliseconds.
"""
