"""Where a job's time went: exclusive states that sum to it, goodput, and what happened.

`spans` and `node` count a node's time and `job` joins the nodes; `codec` and `records` keep them in the Store;
`summary` and `report` show them. Nothing here acts on what it sees.
"""
