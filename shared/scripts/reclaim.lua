-- reclaim(limit, lease, ttl) -> how many requests went to `resume`, or -1 for grace
--
-- Takes back what workers stopped renewing, the longest lapsed first, and forgets silent workers. Anybody may call it, any
-- number at once. If nobody has for a whole lease, the broker was away and no worker could renew: all leases are extended
-- once, and nobody is blamed.
pass_maxmemory()
local limit, lease, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local last = tonumber(redis.call('HGET', META, 'reclaimed') or now)
redis.call('HSET', META, 'reclaimed', integer(now))
if now - last > lease then
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do redis.call('ZADD', LEASES, integer(now + lease), id) end
  return -1
end

local function reclaim_one(id)
  local request = read(id, 'state', 'worker')
  if request.state ~= 'running' then return false end
  give_back(id, request)
  count('reclaimed')
  return true
end

local reclaimed = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, limit)) do
  local ok, given_back = pcall(reclaim_one, id)
  if given_back == true then reclaimed = reclaimed + 1 end
  if not ok then
    count('script_errors')
    refuse(id, '', 'the state of the request is damaged', 'internal', ttl)
  end
  redis.call('ZREM', LEASES, id)
end
redis.call('ZREMRANGEBYSCORE', WORKERS, '-inf', integer(now - FORGET_WORKER_AFTER * lease))
return reclaimed
