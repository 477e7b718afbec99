"""What commands show of loads and of what is wanted, and what joins a job's ledger to the advisor.

What does not belong here: decisions (`edl.master.scaling`) and records (`edl.load_reporting`).
"""
