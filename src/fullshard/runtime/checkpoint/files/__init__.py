"""A checkpoint as files. Nothing here communicates, and nothing trusts what it reads."""
