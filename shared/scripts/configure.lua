-- configure((name, value)...): settings of the queue that all share; an empty value removes one
pass_maxmemory()
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', META, ARGV[i])
  else
    redis.call('HSET', META, ARGV[i], ARGV[i + 1])
  end
end
write_layout()
return 1
