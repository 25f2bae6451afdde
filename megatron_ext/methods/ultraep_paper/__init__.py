"""UltraEP as published, to compare with.

    quota_paper.py  Algorithm 1, strategy `quota_paper`

What is used instead is the quota planner, `balance/strategies/quota.py`.
"""
