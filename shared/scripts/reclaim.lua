-- reclaim(limit, lease, ttl) -> how many requests were taken from their workers or ended, or -1 for grace
--
-- Takes back what workers stopped renewing, the longest lapsed first, ends what has waited past its deadline, and forgets
-- silent workers. Anybody may call it, any number at once. If nobody has for a whole lease, the broker was away and no
-- worker could renew: all leases are extended once, and nobody is blamed.
pass_maxmemory()
local limit, lease, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local last = tonumber(redis.call('HGET', META, 'reclaimed') or now)
redis.call('HSET', META, 'reclaimed', integer(now))
if now - last > lease then
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do redis.call('ZADD', LEASES, integer(now + lease), id) end
  return -1
end

-- A crash is charged to all that ran there, except what got on: saved output since its claim clears the charge.
local function charge(id, request)
  if tonumber(request.tokens or 0) > tonumber(request.claimed_tokens or 0) then
    redis.call('HDEL', request_key(id), 'crashes', 'crashes_alone')
    request.crashes, request.crashes_alone = 0, 0
    return
  end
  request.crashes = tonumber(request.crashes or 0) + 1
  request.crashes_alone = tonumber(request.crashes_alone or 0) + (request.alone and 1 or 0)
  redis.call('HSET', request_key(id), 'crashes', request.crashes, 'crashes_alone', request.crashes_alone)
  if request.crashes == CRASHES_BEFORE_SUSPECT then count('suspected') end
end

local function bury(id, request)
  local why = 'its worker died ' .. request.crashes .. ' times on it'
  redis.call('ZREM', own_key(request.worker), id)
  dead_letter(why, id, request.payload, #request.payload)
  end_early(id, request, 'error', ttl, { code = 'crashed', message = why })
end

local function reclaim_one(id)
  local request = read_whole(id)
  if request.state ~= 'running' then return false end
  count('reclaimed')
  if not called_off(request) then charge(id, request) end
  if tonumber(request.crashes_alone or 0) >= CRASHES_ALONE_BEFORE_DEAD then
    bury(id, request)
  else
    give_back(id, request, ttl)
  end
  return true
end

-- The worker of a running one hears of its deadline from renew.
local function end_overdue(id)
  local request = read_whole(id)
  if request.state ~= 'waiting' then return false end
  end_waiting(id, request, 'deadline', ttl)
  return true
end

local handled = 0

local function sweep(zset, handle)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', zset, '-inf', now, 'LIMIT', 0, limit)) do
    local ok, done = pcall(handle, id)
    if not ok then
      count('script_errors')
      refuse(id, {}, '', 'the state of the request is damaged', 'internal', ttl)
    end
    if done == true then handled = handled + 1 end
    redis.call('ZREM', zset, id)
  end
end

sweep(LEASES, reclaim_one)
sweep(DEADLINES, end_overdue)
redis.call('ZREMRANGEBYSCORE', WORKERS, '-inf', integer(now - FORGET_WORKER_AFTER * lease))
return handled
