"""UltraEP's planner as published and as shipped, to compare with.

Training uses the quota planner instead, `balance/strategies/quota.py`.
"""
