import os

VALUE = os.environ.get("CHOSEN", "before the script chose")
