VALUE = "beside the script"
