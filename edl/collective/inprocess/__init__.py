"""Going on in the same process when workers come and go: `stay`, the fastest way to recover.

`staying` is the loop; `process_group` can be broken from outside (`sockets`); `control` hears of the next generation;
`boundary` undoes a step that failed; `regroup` decides whose state wins.
"""
