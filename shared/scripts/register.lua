-- register(worker, fingerprint, lease) -> the fingerprint that the queue has now
--
-- One queue, one model: a text that is resumed must not change its model halfway. Only a queue that has no requests and no
-- other live worker takes a new fingerprint; a worker that gets another one back than its own must not serve the queue.
pass_maxmemory()
local worker, fingerprint, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function in_use()
  local others = redis.call('ZCOUNT', WORKERS, '(' .. integer(now - FORGET_WORKER_AFTER * lease), '+inf')
  if redis.call('ZSCORE', WORKERS, worker) then others = others - 1 end
  return others > 0 or depth() > 0 or redis.call('EXISTS', LEASES) == 1
end

local present = redis.call('HGET', META, 'model')
if present and present ~= fingerprint and in_use() then return present end
redis.call('HSET', META, 'model', fingerprint)
redis.call('ZADD', WORKERS, integer(now), worker)
write_layout()
return fingerprint
