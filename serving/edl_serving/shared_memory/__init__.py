"""KServe v2's system shared memory extension: registered regions, and the users and connections they belong to."""
