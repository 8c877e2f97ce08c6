"""Child processes for code that is not trusted or not ours: process trees, namespaces, supervisors, pools."""
