"""Planning without a model: synthetic loads, plans compared, machines simulated."""
